"""Publishes as differences to the real engine: a damaged one is replaced by all weights."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.integration.engine.engine_http import serving
from tests.unit.test_delta import Stage
from tidegate.engine.engine import Engine
from tidegate.engine.options import EngineOptions
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.weights import delta_files


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[tuple[Stage, Engine, Publisher]]:
    stage = Stage(tmp_path, "bfloat16")
    engine = Engine.load(EngineOptions(tmp_path / "base", dtype="bfloat16"))

    async def nothing(*_: object) -> None:
        return

    async with serving(engine) as client:
        publisher = Publisher(
            writer=stage.writer,
            engines=lambda: [client.url],
            cancel_stale=nothing,
            quarantine=nothing,
            restore=nothing,
            current=(tmp_path / "base", 0),
            retry_s=5.0,
        )
        yield stage, engine, publisher


class Sender:
    """Records the engines to which all weights are sent."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def retain(self, urls: object) -> None:
        return

    async def send(self, engines: list[object], version: int, keep: object) -> set[str]:
        self.asked.append(version)
        return set()  # the engines then load files


async def publish(stage: Stage, publisher: Publisher) -> Path:
    stage.train()
    await publisher.publish(stage.number)
    stage.writer._full_s = math.inf  # not how fast this machine is
    return publisher.current[0]


async def test_differences_are_published_and_a_damaged_one_is_replaced(
    stand: tuple[Stage, Engine, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, engine, publisher = stand
    full = await publish(stage, publisher)
    assert delta_files.is_delta(await publish(stage, publisher))
    assert publisher.startable == (full, 1), "an engine that restarts needs all weights"
    assert stage.is_live(engine.model.hf_model)

    write = delta_files.write

    def damaged(directory: Path, *arguments: object) -> None:
        write(directory, *arguments)  # type: ignore[arg-type]
        data = bytearray((directory / delta_files.FILE).read_bytes())
        data[-9] ^= 1
        (directory / delta_files.FILE).write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(delta_files, "write", damaged)
        assert not delta_files.is_delta(await publish(stage, publisher))
    assert "refused a difference" in stage.notes[-1]
    assert stage.is_live(engine.model.hf_model)
    assert engine.scheduler.version == "3"
    assert delta_files.is_delta(await publish(stage, publisher)), "the next one is a difference again"
    assert stage.is_live(engine.model.hf_model)


async def test_a_publish_is_timed_until_the_engines_have_loaded_it(
    stand: tuple[Stage, Engine, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, engine, publisher = stand
    timed: list[tuple[bool, str]] = []
    monkeypatch.setattr(
        VersionWriter,
        "on_published",
        lambda _, seconds: timed.append((seconds > 0, engine.scheduler.version)),
    )
    for _ in range(2):
        await publish(stage, publisher)
    assert timed == [(True, "1"), (True, "2")]


async def test_directories_that_no_version_needs_are_removed(
    stand: tuple[Stage, Engine, Publisher],
) -> None:
    stage, _, publisher = stand
    for _ in range(9):
        await publish(stage, publisher)
    kept = {path.name for path in stage.writer.directory.iterdir()}
    assert {"delta-v000008", "v000009"} <= kept, "an engine that joins may still read the version before"
    await publish(stage, publisher)
    names = sorted(path.name for path in stage.writer.directory.iterdir())
    assert names == ["delta-v000010", "v000005", "v000009"]


async def test_with_broadcast_a_difference_is_sent_in_one_call(
    stand: tuple[Stage, Engine, Publisher],
) -> None:
    stage, engine, publisher = stand
    sender = Sender()
    publisher.sender = sender  # type: ignore[assignment]
    await publish(stage, publisher)
    assert delta_files.is_delta(await publish(stage, publisher))
    assert sender.asked == [1], "all weights were sent once"
    assert stage.is_live(engine.model.hf_model)
    assert engine.scheduler.version == "2"
    with torch.no_grad():
        engine.model.hf_model.model.norm.weight.add_(1)  # not the base any more
    assert not delta_files.is_delta(await publish(stage, publisher))
    assert sender.asked == [1, 3]
    assert stage.is_live(engine.model.hf_model)
