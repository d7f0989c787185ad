"""Metrics in TensorBoard and Weights & Biases, with their own writers; and loggers that fail or hang."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from tests import REPO
from tidegate.config import Settings, load_settings
from tidegate.errors import StartError
from tidegate.observer import CompositeObserver, Silent
from tidegate.trainer.loggers import background
from tidegate.trainer.loggers.background import BackgroundLogger
from tidegate.trainer.loggers.registry import check_loggers, make_loggers
from tidegate.trainer.loggers.values import public_settings

DEMO = REPO / "examples" / "demo" / "config.toml"
BLOCK = 32_768
"""Bytes; of LevelDB's log format."""


def settings_of(directory: Path, *loggers: str) -> Settings:
    return load_settings(
        DEMO, [f"--run.dir={directory}", "--gateway.admin_key=SECRET", f"--run.loggers={list(loggers)}"]
    )


def line(step: int, **more: float | None) -> dict[str, float]:
    return {"step": step, "version": step, "time": 1000.0 + step, "reward/mean": step / 10, **more}  # type: ignore[dict-item]


class Ear(Silent):
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[float] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics["step"])


def observed(settings: Settings, steps: range, resumed_from: int | None = None) -> Ear:
    """Tell the settings' loggers of so many steps, as a run does."""
    ear = Ear()
    observer = CompositeObserver([ear, *make_loggers(settings, ear.note)])
    observer.started({"resumed_from": resumed_from})
    for step in steps:
        observer.step(line(step, mismatch_kl=math.nan, logprob_max_error=None))
    observer.close()
    return ear


def test_tensorboard_has_every_number_and_drops_what_a_resume_takes_back(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "tensorboard")
    assert observed(settings, range(5)).notes == []
    assert observed(settings, range(3, 7), resumed_from=2).notes == []
    events = EventAccumulator(str(settings.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"version", "reward/mean"}
    found = [(one.step, one.value, one.wall_time) for one in events.Scalars("reward/mean")]
    assert found == [(step, pytest.approx(step / 10), 1000.0 + step) for step in range(7)]


def test_tensorboard_drops_the_steps_of_a_start_that_left_no_checkpoint(tmp_path: Path) -> None:
    """The next one takes them again, but not the evaluation before the first step."""
    settings = settings_of(tmp_path, "tensorboard")
    observed(settings, range(5))
    observed(settings, range(1, 3))
    events = EventAccumulator(str(settings.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [one.step for one in events.Scalars("reward/mean")] == [0, 1, 2]


@pytest.mark.slow  # wandb starts a process of its own
def test_weights_and_biases_has_every_number_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 90)
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = settings_of(tmp_path, "wandb")
    settings.run_dir.mkdir()
    assert observed(settings, range(4)).notes == []
    wandb.teardown()  # its process writes on behind a run that has finished; wandb ends it at exit
    (written,) = settings.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(written.read_bytes()))
    (run,) = [one.run for one in records if one.HasField("run")]
    assert (run.display_name, run.run_group) == ("demo", "demo")
    assert {one.key for one in run.config.update} >= {"trainer", "eval"}
    assert "SECRET" not in str(records)
    found = [{item.nested_key[0]: item.value_json for item in one.history.item} for one in records]
    steps = [json.loads(one["step"]) for one in found if "step" in one]
    assert steps == list(range(4))
    assert [json.loads(one["reward/mean"]) for one in found if "step" in one] == [0, 0.1, 0.2, 0.3]


def test_loggers_get_no_options_and_no_addresses(tmp_path: Path) -> None:
    judge = ["--env.judge.url=http://u:SECRET@j:1", "--env.judge.model=m", "--env.judge.rubric=r"]
    judge += ["--env.judge.options.user=SECRET"]
    teacher = ["--trainer.teacher.url=http://u:SECRET@t:1", "--trainer.loss.use=a.py:b"]
    teacher += ["--trainer.loss.options.key=SECRET"]
    engine = ["--engine.kind=sglang", "--engine.python=p", "--engine.arguments=--api-key=SECRET"]
    settings = load_settings(None, ["--model.path=m", *judge, *teacher, *engine])
    shown = public_settings(settings)
    assert "SECRET" not in str(shown)
    assert (shown["env"]["judge"]["model"], shown["trainer"]["loss"]["use"]) == ("m", "a.py:b")
    assert "gateway" not in shown
    services = load_settings(None, ["--model.path=m", "--env.urls=http://u:SECRET@e:1"])
    assert "SECRET" not in str(public_settings(services))


@pytest.mark.slow  # its import takes seconds
def test_mlflow_has_every_number_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    settings = settings_of(tmp_path, "mlflow")
    assert observed(settings, range(3)).notes == []
    assert observed(settings, range(2, 4), resumed_from=1).notes == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("tidegate")
    second, first = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert (first.info.run_name, first.info.status) == ("demo", "FINISHED")
    assert first.data.params["trainer.loss.name"] == settings.trainer.loss.name
    assert second.data.tags["tidegate.resumed_from"] == "1"
    assert "SECRET" not in str(first.data.params)
    assert set(first.data.metrics) == {"version", "reward/mean"}
    for run, steps in ((first, range(3)), (second, range(2, 4))):
        history = client.get_metric_history(run.info.run_id, "reward/mean")
        found = [(one.step, one.value, one.timestamp) for one in history]
        assert found == [(step, pytest.approx(step / 10), 1000 * (1000 + step)) for step in steps]


@pytest.mark.slow  # its import takes seconds
def test_trackio_has_every_number_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    settings = settings_of(tmp_path, "trackio")
    assert observed(settings, range(3)).notes == []
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "tidegate.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
        [(config,)] = database.execute("select config from configs").fetchall()
    assert [(name, step, json.loads(values)) for name, step, values in rows] == [
        ("demo", step, {"version": step, "reward/mean": pytest.approx(step / 10)}) for step in range(3)
    ]
    assert json.loads(config)["trainer"]["loss"]["name"] == settings.trainer.loss.name
    assert "SECRET" not in str(config)


def records_of(written: bytes) -> Iterator[Any]:
    """The records of a wandb file: a header, then LevelDB's log format with a protobuf a record."""
    at, whole = 7, b""
    while at + 7 <= len(written):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", written, at)
        whole += written[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(whole)
            whole = b""


class Kept:
    """A logger that keeps the steps it gets."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def step(self, metrics: Mapping[str, float]) -> None:
        self.steps.append(metrics["step"])

    def close(self) -> None:
        pass


class Broken:
    def __init__(self, made: bool) -> None:
        if not made:
            raise OSError("no room")

    def step(self, metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 2:
            raise RuntimeError("no connection")

    def close(self) -> None:
        raise AssertionError("it is told no more")


def test_a_logger_that_does_not_start_at_first_gets_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "START_DELAYS_S", (0.01, 0.01))
    ear, kept, tries = Ear(), Kept(), []

    def make(step: int) -> Kept:
        tries.append(step)
        if len(tries) < 3:
            raise ConnectionError("no route to host")
        return kept

    observer = CompositeObserver([ear, BackgroundLogger("mine", make, ear.note)])
    observer.started({"resumed_from": 4})
    for step in range(20):
        observer.step(line(step))
    observer.close()
    assert tries == [4, 4, 4]
    assert kept.steps == list(range(20))
    assert (
        ear.notes
        == ["the logger mine did not start (ConnectionError: no route to host); trying again in 0.01 s"] * 2
    )


def test_the_end_of_a_run_cuts_short_the_delays_of_a_logger_that_does_not_start() -> None:
    ear, tried = Ear(), threading.Event()

    def make(step: int) -> Kept:
        tried.set()
        raise ConnectionError("no route to host")

    one = BackgroundLogger("mine", make, ear.note)
    one.started({"resumed_from": None})
    assert tried.wait(20)
    one.close()
    assert ear.notes[-1] == "the logger mine is disabled: ConnectionError: no route to host"


@pytest.mark.parametrize(
    ("made", "why"), [(True, "RuntimeError: no connection"), (False, "OSError: no room")]
)
def test_a_logger_that_raises_is_reported_once_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, made: bool, why: str
) -> None:
    monkeypatch.setattr(background, "START_DELAYS_S", ())
    ear = Ear()
    observer = CompositeObserver([ear, BackgroundLogger("mine", lambda step: Broken(made), ear.note)])
    observer.started({"resumed_from": None})
    for step in range(20):
        observer.step(line(step))
    observer.close()
    assert ear.steps == list(range(20))
    assert ear.notes == [f"the logger mine is disabled: {why}"]


@pytest.mark.parametrize(("steps", "why"), [(3, "did not finish within 0.1 s"), (50, "10 steps are queued")])
def test_a_logger_that_hangs_does_not_block_the_run(
    monkeypatch: pytest.MonkeyPatch, steps: int, why: str
) -> None:
    monkeypatch.setattr(background, "CLOSE_S", 0.1)
    monkeypatch.setattr(background, "MAX_QUEUED", 10)
    let_go = threading.Event()
    ear = Ear()

    def hang(_: int) -> Broken:
        let_go.wait(20)
        return Broken(True)

    one = BackgroundLogger("mine", hang, ear.note)
    one.started({"resumed_from": None})
    for step in range(steps):
        one.step(line(step))
    one.close()
    let_go.set()
    (said,) = ear.notes
    assert why in said


def test_a_logger_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Callable[[str], object] = {"tensorboard": object()}.get
    monkeypatch.setattr(importlib.util, "find_spec", found)
    check_loggers(settings_of(tmp_path, "tensorboard"))
    with pytest.raises(StartError, match=r"install Tidegate's extra 'wandb'"):
        check_loggers(settings_of(tmp_path, "tensorboard", "wandb"))
