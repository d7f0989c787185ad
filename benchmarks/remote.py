"""The demo with agents in three worker processes, one of them in JavaScript, that are killed and stopped.

A third of the steps into the run, a Python worker is killed (-9); after half of them the other one is stopped
(SIGSTOP), and after two thirds the one in JavaScript is killed. Each is replaced. No attempt may be lost or
trained on twice (`lineage.py` checks the files), and no task quarantined. The demo also runs with agents
of its own: the median step with workers may take at most 1/0.9 of that time. At last a gateway
without attempts gets 10,000 polls a minute; its processor time is measured.

    python benchmarks/remote.py [--json] [--steps N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from common import Check, report
from lineage import last_step, lineage_of, metrics_of

from tidegate.config import load_settings
from tidegate.gateway.ids import agents_key
from tidegate.trainer.ledger.audit import audit_run

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo" / "config.toml"
JAVASCRIPT = ROOT / "examples" / "remote" / "worker.mjs"
KEY = "worker-key-of-the-benchmark"
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "TIDEGATE_WORKER_KEY": KEY,
}  # fmt: skip
RUN_S = 3600.0
POLLS_PER_S, POLLS_S = 10_000 / 60, 30.0


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] = ENVIRONMENT
) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )


def start_worker(kind: str, url: str, log: Path) -> subprocess.Popen[bytes]:
    if kind == "javascript":
        return start(["node", str(JAVASCRIPT), url, "64"], log)
    command = [sys.executable, "-m", "tidegate", "worker", "--gateway", url, "--agent", "solver"]
    return start(command, log)


def train(directory: Path, overrides: Sequence[str], kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the demo once; with `kinds`, in workers that are killed and stopped."""
    directory.mkdir(parents=True)
    place = [f"--run.dir={directory}", "--run.name=run", "--run.live_view=false"]
    remote = ["--agent.source=remote", "--agent.heartbeat_s=2"] if kinds else []
    run_dir = directory / "run"
    words = [sys.executable, "-m", "tidegate", "train", str(DEMO), *place, *remote, *overrides]
    run = start(words, directory / "out")
    workers: list[subprocess.Popen[bytes]] = []
    try:
        if kinds:
            address = run_dir / "logs" / "gateway.address"
            _until(run, address.exists)
            url = json.loads(address.read_text())["url"]
            workers = [start_worker(kind, url, directory / "workers.log") for kind in kinds]
            _disturb(run, run_dir, workers, kinds, url, load_settings(DEMO, overrides).trainer.steps)
        code = run.wait(RUN_S)
    finally:
        for process in (run, *workers):
            process.kill()
            process.wait()
    return {"run": "remote" if kinds else "local", "exit": code, **figures(run_dir, overrides)}


def _disturb(
    run: subprocess.Popen[bytes],
    run_dir: Path,
    workers: list[subprocess.Popen[bytes]],
    kinds: Sequence[str],
    url: str,
    steps: int,
) -> None:
    signals = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)
    for number, (kind, what) in enumerate(zip(kinds, signals, strict=True)):
        _until(run, lambda at=steps * (2 + number) // 6: last_step(run_dir) >= at)  # type: ignore[misc]
        workers[number].send_signal(what)
        workers.append(start_worker(kind, url, run_dir.parent / "workers.log"))


def _until(run: subprocess.Popen[bytes], holds: Any) -> None:
    deadline = time.monotonic() + RUN_S
    while not holds() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def figures(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    entries = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    metrics = metrics_of(run_dir)
    found = lineage_of(run_dir, load_settings(DEMO, overrides).trainer.groups_per_batch)
    audit = audit_run(run_dir)
    for problem in [*found.lost[:10], *found.doubled[:10], *audit.findings[:10]]:
        print(problem, file=sys.stderr)
    steps = [line["time/step"] for line in metrics if line["step"] > 1 and "time/step" in line]
    return {
        "steps": found.steps,
        "held_out": metrics[-1].get("eval/reward"),
        "median_step_s": statistics.median(steps),
        "infra_errors": sum(one.get("outcome") == "infra_error" for one in entries),
        "quarantined": sum(one["event"] == "quarantined" for one in entries),
        "lost": len(found.lost),
        "doubled": len(found.doubled),
        "audit_findings": len(audit.findings),
    }


def idle_polls(directory: Path, seconds: float = POLLS_S, shards: int = 1) -> dict[str, Any]:
    """Share of a core that a gateway process uses for 10,000 polls a minute without attempts.

    For comparison, it is measured for as many requests of a path that does not exist, too. With several
    shards, the process is their router, and the polls are those of the trainer's own agents: a sharded
    gateway takes no other workers.
    """
    directory.mkdir(exist_ok=True)
    environment, key = ENVIRONMENT, KEY
    if shards > 1:
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "TIDEGATE_WORKER_KEY"}
        environment["TIDEGATE_ADMIN_KEY"], key = KEY, agents_key(KEY)
    announce = directory / "gateway.json"
    model = str(load_settings(DEMO).model.path)
    command = [sys.executable, "-m", "tidegate", "gateway", "--model.path", model, "--gateway.port", "0"]
    command += [f"--gateway.shards={shards}", "--announce", str(announce)]
    gateway = start(command, directory / "gateway.log", environment)
    try:
        _until(gateway, announce.exists)
        url = json.loads(announce.read_text())["url"]
        asyncio.run(_send(f"{url}/attempts/next", 2.0, key))
        cores = {}
        for name, path in (("cores", "/attempts/next"), ("cores_of_unknown_path", "/v1/none")):
            before, began = _cpu_s(gateway.pid), time.monotonic()
            asyncio.run(_send(url + path, seconds, key))
            cores[name] = (_cpu_s(gateway.pid) - before) / (time.monotonic() - began)
    finally:
        gateway.kill()
        gateway.wait()
    return {"run": "idle polls", **cores}


async def _send(url: str, seconds: float, key: str) -> None:
    """Sends polls at an even pace; each waits a second for attempts."""
    headers = {"Authorization": f"Bearer {key}"}
    polls, began = 0, time.monotonic()
    async with (
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):

        async def poll(number: int) -> None:
            body = {"worker": f"w{number % 1000}", "capacity": 1, "wait_s": 1}
            async with http.post(url, json=body) as response:
                await response.read()

        while (passed := time.monotonic() - began) < seconds:
            while polls < passed * POLLS_PER_S:
                group.create_task(poll(polls))
                polls += 1
            await asyncio.sleep(0.005)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def checks_of(results: Sequence[dict[str, Any]], whole: bool) -> list[Check]:
    local, remote, polls = results
    checks = [
        Check("attempts_lost", float(remote["lost"] + remote["audit_findings"]), "==", 0),
        Check("attempts_doubled", float(remote["doubled"]), "==", 0),
        Check("quarantined_wrongly", float(remote["quarantined"]), "==", 0),
        Check("exit", float(remote["exit"]), "==", 0),
        Check("steps_per_s_of_local", local["median_step_s"] / remote["median_step_s"], ">=", 0.9),
        Check("idle_polls_cores", polls["cores"], "<", 0.05),
    ]
    if whole:
        checks.append(Check("reward", remote["held_out"], ">=", 0.9))
    else:
        print("reward: not checked, as --steps is less than the demo's")
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, help="steps per run; default: the demo's")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments, overrides = parser.parse_known_args()
    if arguments.steps is not None:
        overrides.append(f"--trainer.steps={arguments.steps}")
    kinds = ["python", "python", "javascript"]
    if shutil.which("node") is None:
        print("the worker in JavaScript is replaced by one in Python: there is no node")
        kinds[2] = "python"
    whole = load_settings(DEMO, overrides).trainer.steps >= load_settings(DEMO).trainer.steps
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-remote-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        results = [
            train(directory / "local", overrides),
            train(directory / "remote", overrides, kinds),
            idle_polls(directory),
        ]
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    return report(results, checks_of(results, whole), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
