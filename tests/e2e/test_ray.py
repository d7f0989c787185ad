"""Runs on a real Ray cluster of two nodes: training, lost actors, orderly stop, cleanup."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.runs import REPO, held, ledger, metrics, training
from tests.ray_cluster import SEATS, RayCluster, may_hide, nothing_left, ray_cluster
from tidegate.errors import StartError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_hide(), reason="nodes have mounts and networks of their own"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as one:
        yield one


def test_a_run_of_many_actors_loses_some_and_continues(cluster: RayCluster) -> None:
    run_dir = cluster.runs / "many"
    arguments = [
        "--cluster", cluster.address, "--trainer.steps=1000", "--trainer.ranks=2", "--engine.count=2",
        "--gateway.shards=2", "--agent.workers=2", f"--agent.use={REPO}/tests/e2e/slow_solver.py:SlowSolver",
        *SEATS,
    ]  # fmt: skip
    with training(run_dir, *arguments, environment=cluster.environment) as run:
        run.until_step(1)
        (owner,) = cluster.owners("engine-1.address")
        os.kill(owner, signal.SIGKILL)
        run.until_said("the engine-1 is back")
        failed = run_dir / "trajectories" / "failed.jsonl"
        for _ in range(4):  # a worker that has just been started may have no episode yet
            os.kill(cluster.owners("tidegate worker")[0], signal.SIGKILL)
            lost_at = metrics(run_dir)[-1]["step"]
            run.until(lambda: len(cluster.owners("tidegate worker")) == 2)
            run.until_step(lost_at + 3)
            if failed.exists() and '"outcome":"cancelled"' in failed.read_text():
                break
        run.interrupt()
        assert run.wait(60) == 130, run.output()
    assert nothing_left(cluster, "many")
    said = " ".join(run.output().split())
    assert "the engine-1 was lost" in said
    assert "finishing the current step and writing a checkpoint" in said
    lines = metrics(run_dir)
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3, "sampled with what was published"
    assert held(run_dir).groups["trained"] == 4 * lines[-1]["step"]
    failures = failed.read_text()
    assert re.search(r"the agent-[12] was lost", said)
    assert '"outcome":"cancelled"' in failures, "the episodes of the lost actor"
    for name in ("engine-1", "engine-2", "trainer-1", "gateway", "agent-1", "agent-2"):
        assert (run_dir / "logs" / f"{name}.log").exists(), "logs of both nodes are together"


def test_states_tools_and_rewards_are_on_another_node_and_come_back(cluster: RayCluster) -> None:
    run_dir = cluster.runs / "states"
    seats = [seat for seat in SEATS if not seat.startswith("--cluster.env")]
    arguments = [
        "--cluster", cluster.address, "--trainer.steps=1000", f"--env.use={REPO}/benchmarks/desk.py:Desk",
        "--agent.use=chat", "--cluster.env={CPU = 0.1, far = 0.1}", *seats,
    ]  # fmt: skip
    with training(run_dir, *arguments, environment=cluster.environment) as run:
        run.until_step(1)
        command = cluster.command("env.address")
        assert command[command.index("--host") + 1] not in (cluster.network.address(1), "127.0.0.1")
        (owner,) = cluster.owners("env.address")
        os.kill(owner, signal.SIGKILL)
        run.until_said("the env is back")
        run.until_step(metrics(run_dir)[-1]["step"] + 2)
        run.interrupt()
        assert run.wait(60) == 130, run.output()
    assert nothing_left(cluster, "states")
    assert "the env was lost" in " ".join(run.output().split())
    assert (run_dir / "logs" / "env.log").exists(), "the log of another node"
    assert held(run_dir).groups["failed"] == 0
    entries = ledger(run_dir)
    assert not [one for one in entries if one["event"] == "quarantined"]
    outcomes = {one.get("outcome") for one in entries if one.get("state") == "failed"}
    assert outcomes <= {"infra_error", "cancelled"}


def test_a_killed_command_takes_its_run_along(cluster: RayCluster) -> None:
    """The run has two ranks and LoRA, and broadcasts merged weights over a process group."""
    run_dir = cluster.runs / "killed"
    arguments = [
        "--cluster", cluster.address, "--trainer.steps=1000", "--trainer.ranks=2", "--trainer.lora.rank=4",
        "--trainer.publish_transport=broadcast", *SEATS,
    ]  # fmt: skip
    with training(run_dir, *arguments, environment=cluster.environment) as run:
        run.until_step(3)
        run.kill()
    assert nothing_left(cluster, "killed")
    assert "read from files" not in run.output()
    errors = [line["logprob_max_error"] for line in metrics(run_dir)[1:]]
    assert max(error or 0 for error in errors) < 1e-3, "sampled with what was sent"
    held(run_dir)


def test_a_lost_node_is_replaced_and_twice_interrupted_ends_all(cluster: RayCluster) -> None:
    run_dir = cluster.runs / "node"
    arguments = ["--cluster", cluster.address, "--trainer.steps=1000", *SEATS]
    with training(run_dir, *arguments, environment=cluster.environment) as run:
        run.until_step(1)
        before = cluster.command("engine.address")
        cluster.join()
        lost_at = metrics(run_dir)[-1]["step"]
        cluster.lose(1)
        run.until_said("the engine is back at version")
        after = cluster.command("engine.address")
        assert before[before.index("--host") + 1] != after[after.index("--host") + 1]
        run.until_step(lost_at + 3)
        run.interrupt()
        run.until_said("finishing the current step and writing a checkpoint")
        os.kill(cluster.pid("ray::RunActor"), signal.SIGSTOP)  # it cannot finish its step
        run.interrupt()
        assert run.wait(20) == 130, run.output()
    assert nothing_left(cluster, "node")
    assert "the engine was lost" in " ".join(run.output().split())
    lines = metrics(run_dir)
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3, "sampled with what was published"
    held(run_dir)


def test_what_goes_wrong_on_a_cluster_is_said(cluster: RayCluster) -> None:
    home = cluster.runs / "home"  # no token file in the home directory
    home.mkdir()
    environment = cluster.environment | {
        "HOME": str(home),
        "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "1",
        "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "1",
    }
    without = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}
    wrong = environment | {"RAY_AUTH_TOKEN": "0" * 64}
    with (
        training(cluster.runs / "without", "--cluster", cluster.address, environment=without) as no_token,
        training(cluster.runs / "wrong", "--cluster", cluster.address, environment=wrong) as wrong_token,
        training(cluster.runs / "client", "--cluster", cluster.client, environment=wrong) as client,
    ):
        # A separate process, because Ray reads its token once, on import.
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray_faults", cluster.address],
            capture_output=True, text=True, timeout=120, env=cluster.environment, cwd=REPO, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for refused in (no_token, wrong_token, client):
            assert refused.wait(60) == StartError.exit_code, refused.output()
            sentence = refused.output().splitlines()[-1]
            assert sentence.startswith("tidegate: --cluster")
            assert "RAY_AUTH_TOKEN or ~/.ray/auth_token, as on its nodes" in sentence


def test_clients_without_keys_cannot_disturb_a_run(cluster: RayCluster) -> None:
    """They reach every port of the run's processes on the nodes' addresses."""
    run_dir = cluster.runs / "attacked"
    arguments = ["--cluster", cluster.address, "--trainer.steps=1000", "--trainer.ranks=2", *SEATS]
    with training(run_dir, *arguments, environment=cluster.environment) as run:
        run.until_step(1)
        doors = cluster.doors()
        served = {door: statuses(door) for door in doors}
        for door in doors:
            send(door, os.urandom(2**16))
            send(door, b"\0" * 2**16)
        lost_at = metrics(run_dir)[-1]["step"]
        run.until_step(lost_at + 3)
        run.interrupt()
        assert run.wait(60) == 130, run.output()
    gateway_and_engine = [door for door, found in served.items() if 401 in found]
    assert len(gateway_and_engine) >= 2, served
    assert not [(door, found) for door, found in served.items() if any(200 <= one < 300 for one in found)]
    assert " was lost" not in run.output()
    assert held(run_dir).groups["failed"] == 0
    assert nothing_left(cluster, "attacked")


REQUESTS = [
    ("GET", "/sessions"), ("GET", "/groups"), ("POST", "/groups/lease"), ("POST", "/attempts/next"),
    ("POST", "/v1/chat/completions"), ("POST", "/generate"), ("POST", "/pause_generation"),
    ("POST", "/update_weights_from_disk"), ("POST", "/score"), ("POST", "/states"), ("POST", "/tools/call"),
]  # fmt: skip


def statuses(door: tuple[str, int]) -> list[int]:
    """The status of each request without a key; empty if the server speaks no HTTP."""
    found = []
    for method, path in REQUESTS:
        body = b"{}" if method == "POST" else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: {door[0]}\r\ncontent-type: application/json\r\n"
        said = send(door, f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        answer = re.match(rb"HTTP/1\.\d (\d{3})", said)
        if answer is None:
            break
        found.append(int(answer[1]))
    return found


def send(door: tuple[str, int], data: bytes) -> bytes:
    """Sends bytes on a connection of their own; returns the beginning of the answer."""
    with contextlib.suppress(OSError), socket.create_connection(door, timeout=10) as connection:
        connection.settimeout(2)
        connection.sendall(data)
        return connection.recv(4096)
    return b""
