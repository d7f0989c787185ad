"""The servers of a run: their number, names, command lines and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from tidegate.config import load_settings
from tidegate.errors import StartError
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.processes import launcher
from tidegate.trainer.processes.provider import GatewayAccess
from tidegate.trainer.processes.servers import (
    MAX_RESTARTS,
    LocalProcesses,
    engine_arguments,
    gateway_arguments,
    snapshot_weights,
)
from tidegate.trainer.start import Start


@pytest.mark.parametrize(("count", "names"), [(1, ["engine"]), (3, ["engine-1", "engine-2", "engine-3"])])
def test_several_engines_from_one_setting(tmp_path: Path, count: int, names: list[str]) -> None:
    settings = load_settings(None, ["--model.path=x", f"--engine.count={count}", "--engine.threads=2"])
    services = LocalProcesses().engines(settings, tmp_path, lambda: (tmp_path / "v7", 7))
    assert [one.name for one in services] == names
    assert len({one.log for one in services}) == count
    command = engine_arguments(settings, lambda: (tmp_path / "v7", 7))
    assert "--engine.threads=2" in command, "each has its own"
    assert command[command.index("--weight-version") + 1] == "7"


def test_weights_that_an_engine_starts_with_outlive_the_version(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.safetensors").write_text(version)
    place, version = snapshot_weights(lambda: (tmp_path / "v1", 1), tmp_path, "engine-1")
    shutil.rmtree(tmp_path / "v1")
    assert ((place / "model.safetensors").read_text(), version) == ("v1", 1)
    again, version = snapshot_weights(lambda: (tmp_path / "v2", 2), tmp_path, "engine-1")
    assert ((again / "model.safetensors").read_text(), version, again) == ("v2", 2, place)
    own = tmp_path / "v2" / "solver"  # of one of several policies
    own.mkdir()
    assert snapshot_weights(lambda: (own, 2), tmp_path, "engine-solver")[0] == tmp_path / "of-engine-solver"
    base = tmp_path.parent / "base"
    assert snapshot_weights(lambda: (base, 0), tmp_path, "engine-1") == (base, 0)


@dataclass
class Mortal:
    """A server that dies once, and of whose restarts the first so many fail. It stands for the list of
    engines and for the gateway's client, too."""

    failing: int
    name: str = "engine"
    url: str = "http://127.0.0.1:1"
    restarts: int = 0
    notes: list[str] = field(default_factory=list)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: str = ""

    async def wait_for_exit(self) -> str:
        if self.restarts:
            self.back.set()
            await asyncio.Event().wait()
        return f"the {self.name} was killed by SIGKILL"

    async def restart(self) -> None:
        self.restarts += 1
        if self.restarts <= self.failing:
            raise StartError(f"the {self.name} did not start: no memory")
        self.url = "http://127.0.0.1:2"

    def last_log_line(self) -> str:
        return "its last words"

    async def on_restart(self, old_url: str, url: str) -> None:
        self.notes.append(f"{old_url} is {url} now")

    def abort(self, reason: str) -> None:
        self.given_up = reason

    async def kept(self) -> None:
        """Until it serves again, or its owner gives it up."""
        one = cast(Any, self)
        keeping = asyncio.create_task(
            launcher.supervise(one, self.notes.append, lambda: " at version 7", one.on_restart)
            if self.name == "engine"
            else launcher._supervise_gateway(one, one, self.notes.append)
        )
        serving = asyncio.create_task(self.back.wait())
        async with asyncio.timeout(5):
            await asyncio.wait([keeping, serving], return_when=asyncio.FIRST_COMPLETED)
        for task in (keeping, serving):
            task.cancel()
        if keeping.done():
            await keeping
        await asyncio.gather(keeping, serving, return_exceptions=True)


@pytest.fixture(params=["engine", "gateway"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either of the servers, which is started again at once."""
    monkeypatch.setattr(launcher, "PAUSE_S", 0)
    return str(request.param)


async def test_a_server_that_dies_as_it_starts_is_started_again(name: str) -> None:
    server = Mortal(failing=2, name=name)
    await server.kept()
    assert server.restarts == 3
    assert server.notes[:3] == [
        f"the {name} was killed by SIGKILL; starting it again",
        *[f"the {name} did not start: no memory; starting it again"] * 2,
    ]
    assert f"the {name} is back" in server.notes[3]
    if name == "engine":
        assert server.notes[4] == "http://127.0.0.1:1 is http://127.0.0.1:2 now"


async def test_a_server_that_never_starts_again_is_given_up(name: str) -> None:
    server = Mortal(failing=1000, name=name)
    with pytest.raises(StartError, match="did not start: no memory, after 5 restarts; its last words"):
        await server.kept()
    assert server.restarts == MAX_RESTARTS
    assert ("no memory" in server.given_up) == (name == "gateway")


def test_the_workers_key_is_made_once_or_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_WORKER_KEY", raising=False)
    key = launcher.worker_key(tmp_path)
    assert launcher.worker_key(tmp_path) == key, "a resumed run keeps it"
    file = tmp_path / "worker.key"
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (f"{key}\n", 0o600)
    monkeypatch.setenv("TIDEGATE_WORKER_KEY", "given")
    assert launcher.worker_key(tmp_path) == "given"
    assert "TIDEGATE_WORKER_KEY" not in os.environ, "no other process inherits it"
    assert file.read_text() == "given\n"


def test_a_run_with_workers_elsewhere_starts_no_agents(tmp_path: Path) -> None:
    settings = load_settings(None, ["--model.path=x", "--agent.source=remote"])
    assert LocalProcesses().agents(settings, tmp_path, GatewayAccess("http://g", "key")) == []


def test_clients_episodes_have_the_runs_settings(tmp_path: Path) -> None:
    """Their sampling, deadline and number follow from the run, and its environment is not loaded."""
    settings = load_settings(
        None,
        [
            "--model.path=x", "--agent.source=client", "--agent.deadline_s=7", "--gateway.keys=keys.json",
            "--sampling.max_tokens=9", "--trainer.groups_per_batch=4", "--trainer.max_staleness=1",
        ],
    )  # fmt: skip
    assert LocalProcesses().agents(settings, tmp_path, GatewayAccess("http://g", "key")) == []
    arguments = gateway_arguments(settings, "127.0.0.1")
    assert {"--clients.max_groups=8", "--clients.deadline_s=7.0", "--clients.max_tokens=9"} <= set(arguments)
    assert f"--gateway.keys={Path('keys.json').absolute()}" in arguments
    assert not any(argument.startswith("--env") for argument in arguments)


def test_shared_engines_serve_a_frozen_policy_without_an_adapter() -> None:
    words = ["--model.path=x", "--trainer.lora.rank=2", "--trainer.lora.publish=adapter"]
    settings = load_settings(None, [*words, '--policies={a={}, old={earlier="a"}, fixed={train=false}}'])
    arguments = gateway_arguments(settings, "127.0.0.1")
    served = {name: f"--policies.{name}.adapter=true" in arguments for name in settings.policies}
    assert served == {"a": True, "old": True, "fixed": False}, arguments


async def test_a_gateway_that_does_not_answer_is_named_before_the_run_starts(tmp_path: Path) -> None:
    settings = load_settings(None, ["--model.path=x", "--gateway.url=http://127.0.0.1:9"])
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(StartError, match=r"gateway\.url = http://127\.0\.0\.1:9: cannot reach"):
            await launcher._connect_to_gateway(settings, stack)


def test_the_epochs_and_versions_of_runs_that_lead_one_gateway_rise(tmp_path: Path) -> None:
    own = Start.of(load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}"]), resume=False)
    led = Start.of(
        load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}", "--gateway.url=http://g:1"]),
        resume=False,
    )
    assert (own.epoch, own.version) == (1, 0)
    assert min(led.epoch, led.version) > 1_700_000_000


def test_the_version_also_rises_after_a_first_start_that_failed_before_its_entry(tmp_path: Path) -> None:
    settings = load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}", "--gateway.url=http://g:1"])
    failed = Start.of(settings, resume=False)
    settings.run_dir.mkdir(parents=True)
    with Ledger(settings.run_dir / "ledger.jsonl") as ledger:
        ledger.record(entry("run", "ended", epoch=failed.epoch, step=0, version=failed.version))
    led = Start.of(settings, resume=True)
    assert led.epoch > failed.epoch
    assert led.version >= failed.version, "other runs have led the gateway"
