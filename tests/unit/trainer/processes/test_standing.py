"""A standing service: its settings, the weights of a restarted engine, and its trainer's settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tidegate.config import load_settings
from tidegate.errors import ConfigError, StartError
from tidegate.service.directory_lock import DirectoryLock
from tidegate.service.serve import Listen, bind
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.processes import standing as standing_module
from tidegate.trainer.processes.standing import ENDLESS, StandingService, TrainerProcess
from tidegate.trainer.start import Start
from tidegate.viewer.summary import continue_command, next_steps

CLIENT = [
    "--model.path=x", "--agent.source=client", "--gateway.keys=keys.json", "--trainer.baseline=batch",
    "--trainer.group_size=1",
]  # fmt: skip


def service(tmp_path: Path, *more: str) -> StandingService:
    return StandingService(load_settings(None, [*CLIENT, f"--run.dir={tmp_path}", *more]), print)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--trainer.schedule=linear"], 'trainer.schedule = "linear" needs the number of steps'),
        (["--trainer.teacher.path=y"], "start the teacher with tidegate engine"),
        (["--engine.urls=http://e:1"], "engine.urls has no effect with tidegate serve"),
        (["--policies={a={}}"], "policies is not supported with tidegate serve"),
    ],
)
def test_settings_that_contradict_a_standing_service_are_refused(
    tmp_path: Path, given: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        service(tmp_path, *given)


def test_local_agents_are_refused(tmp_path: Path) -> None:
    settings = load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r'agent\.source = "local": a standing service learns from clients'):
        StandingService(settings, print)


def test_a_restarted_engine_starts_with_the_newest_published_weights(tmp_path: Path) -> None:
    standing = service(tmp_path)
    assert standing.newest_weights()[0] == Path("x").absolute()
    for name in ("v000009", "v000010", ".v000011.partial", "of-engine"):
        (tmp_path / "run" / "weights" / name).mkdir(parents=True)
    assert standing.newest_weights() == (tmp_path / "run" / "weights" / "v000010", 10)


async def test_a_taken_port_is_told_with_the_setting(tmp_path: Path) -> None:
    with bind(Listen()) as taken:
        taken.listen()
        standing = service(tmp_path, f"--gateway.port={taken.getsockname()[1]}")
        with pytest.raises(StartError, match=r"choose another port \(gateway\.port\)"):
            await standing.gateway.start()


def test_engines_and_trainer_start_with_one_version_of_the_model(tmp_path: Path) -> None:
    standing = service(tmp_path)
    standing.engines[0].url, standing.gateway.url = "http://127.0.0.1:1", "http://127.0.0.1:2"
    weights, version = standing.newest_weights()
    assert version == 0, "its gateway has served no other run"
    settings = load_settings(standing.write_trainer_settings())
    start = Start.of(settings, resume=False)
    assert (start.weights, start.version) == (weights, version), "what was sampled before it is not stale"
    assert service(tmp_path).newest_weights() == (weights, version), "also after a restart of the service"

    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:  # of a start that failed before its entry
        ledger.record(entry("run", "ended", epoch=start.epoch, step=0, version=version))
    assert Start.of(settings, resume=True).version == version

    other = settings.model_copy(update={"run": settings.run.model_copy(update={"name": "other"})})
    assert Start.of(other, resume=False).version >= version, "no version of another run"


@pytest.mark.parametrize(("given", "steps"), [([], ENDLESS), (["--trainer.steps=7"], 7)])
def test_the_trainer_leads_the_services_gateway(tmp_path: Path, given: list[str], steps: int) -> None:
    judge = ["--env.judge.url=http://j", "--env.judge.model=m", "--env.judge.rubric=r"]
    standing = service(tmp_path, "--gateway.port=8123", "--trainer.max_staleness=3", *judge, *given)
    standing.engines[0].url, standing.gateway.url = "http://127.0.0.1:1", "http://127.0.0.1:2"
    (tmp_path / "run").mkdir()
    settings = load_settings(standing.write_trainer_settings())
    assert (settings.gateway.url, settings.engine.urls) == ("http://127.0.0.1:2", ["http://127.0.0.1:1"])
    assert (settings.trainer.steps, settings.trainer.max_staleness) == (steps, 3)
    assert settings.trainer.step_limit == (None if steps == ENDLESS else steps)
    assert settings.run_dir == tmp_path / "run"
    assert settings.env.judge.url is None, "the gateway has the judge"


@pytest.mark.parametrize(
    "given",
    [
        ["--engine.kind=sglang", "--engine.python=p"],
        ["--engine.kind=vllm", "--engine.python=p", '--engine.arguments=["--dtype", "half"]'],
        ["--engine.device=cuda"],
        ["--engine.dtype=bfloat16"],
    ],
)
def test_the_trainer_publishes_for_the_kind_and_number_type_of_the_services_engines(
    tmp_path: Path, given: list[str]
) -> None:
    standing = service(tmp_path, *given)
    standing.engines[0].url, standing.gateway.url = "http://127.0.0.1:1", "http://127.0.0.1:2"
    (tmp_path / "run").mkdir()
    published, served = load_settings(standing.write_trainer_settings()).engine, standing.settings.engine
    assert (published.kind, published.weights_dtype) == (served.kind, served.weights_dtype)


@pytest.mark.parametrize(("given", "limited"), [([], False), (["--trainer.steps=7"], True)])
def test_the_services_settings_continue_it_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], limited: bool
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("rubric.md").write_text("r")
    judge = ["--env.judge.url=http://j", "--env.judge.model=m", "--env.judge.rubric_file=rubric.md"]
    standing = service(tmp_path, "--gateway.port=8123", *judge, *given)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert continue_command(run_dir, None) == f"tidegate train {run_dir}/config.toml"
    standing.write_service_settings()
    keys = Path("keys.json").absolute()
    monkeypatch.chdir(tmp_path)
    assert continue_command(run_dir, 14) == f"tidegate serve {run_dir}/service.toml --trainer.steps 14"
    settings = load_settings(run_dir / "service.toml")
    StandingService(settings, print)
    assert settings.run_dir == run_dir
    assert (settings.gateway.port, settings.gateway.keys) == (8123, keys)
    assert settings.env.judge.rubric_file == tmp_path / "here" / "rubric.md"
    assert ("steps" in settings.trainer.model_fields_set) == limited, "without a limit it stays without one"
    steps = dict(
        next_steps({"resume": continue_command(run_dir, None), "checkpoint": run_dir / "c"}, run_dir)
    )
    assert steps["serve clients and train from the checkpoint"] == f"tidegate serve {run_dir}/service.toml"
    assert not [command for command in steps.values() if command.startswith("tidegate train")]


async def test_a_trainer_that_refuses_its_settings_is_not_restarted(tmp_path: Path) -> None:
    bad = tmp_path / "trainer.toml"
    bad.write_text("[trainer]\nstepz = 3\n")
    (tmp_path / "logs").mkdir()
    with DirectoryLock(tmp_path, "tidegate serve") as lock:
        trainer = TrainerProcess(bad, tmp_path, "key", lock)
        await trainer.start()
        with pytest.raises(ConfigError, match="trainer ended with exit code 2: its settings were refused"):
            await trainer.wait_for_exit()
    assert not trainer.finished()


class Flaky:
    """A server that exits twice and whose restarts fail twice, each in its own way."""

    name = "engine"

    def __init__(self, stop: asyncio.Event) -> None:
        self.exits = iter(["it was killed", "it ended"])
        self.failures = iter([FileNotFoundError("the weights are gone"), StartError("no memory"), None, None])
        self.stop = stop
        self.restarts = 0

    async def wait_for_exit(self) -> str:
        if (why := next(self.exits, None)) is None:
            self.stop.set()
            await asyncio.Event().wait()
        return str(why)

    async def restart(self) -> None:
        self.restarts += 1
        if (failure := next(self.failures)) is not None:
            raise failure


async def test_an_exited_process_is_restarted_until_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_module, "FIRST_S", 0.0)
    monkeypatch.setattr(standing_module, "LONGEST_S", 0.0)
    notes: list[str] = []
    service = StandingService(load_settings(None, [*CLIENT, f"--run.dir={tmp_path}"]), notes.append)
    flaky = Flaky(service.stop)
    keeping = asyncio.create_task(service.keep(cast(Any, flaky)))
    async with asyncio.timeout(10):
        await service.stop.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert flaky.restarts == 4
    assert notes == [
        "it was killed; starting it again", "the weights are gone; starting it again",
        "no memory; starting it again", "the engine is back",
        "it ended; starting it again", "the engine is back",
    ]  # fmt: skip
