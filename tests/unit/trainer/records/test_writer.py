"""Writes to a run's files beside the event loop: order, errors, cancellation, close."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.slow_files import slow_file
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.waiting import eventually
from tidegate import failpoints
from tidegate.observer import Silent
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.client_log import ClientLog
from tidegate.trainer.records.dead_letters import DeadLetters
from tidegate.trainer.records.metrics import MetricsLog, read_metrics
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles, read_lines
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Group, Task, Trajectory


@pytest.fixture
async def writer() -> AsyncIterator[FileWriter]:
    async with FileWriter() as opened:
        yield opened


def episode(group: str = "g1") -> Trajectory:
    made = make_trajectory([make_turn(0, None, [1], [2])])
    made.group_id, made.client = group, "shop"
    return made


def batch(*groups: str) -> Batch:
    members = [Group(name, "t", [episode(name)]) for name in groups]
    return Batch(1, [0], members, [], 0.0, 0.0, [[1.0]] * len(groups))


WRITES: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "trajectories/step_000001.jsonl.part": lambda run: partial(TrajectoryFiles(run).batch, batch("g1"), 1),
    "trajectories/eval_000001.jsonl.part": lambda run: partial(
        TrajectoryFiles(run).evaluation, 1, [("", "greedy", episode())]
    ),
    "trajectories/failed.jsonl": lambda run: partial(TrajectoryFiles(run).append, [episode()], State.FAILED),
    "dead_letters.jsonl": lambda run: partial(DeadLetters(run).write, Task("t", "e", []), "g1", 0, []),
    "clients.jsonl": lambda run: partial(ClientLog(run).offered, Group("g1", "t", [episode()]), None),
}


@pytest.mark.parametrize("name", WRITES)
async def test_the_event_loop_goes_on_while_a_file_is_written(
    tmp_path: Path, writer: FileWriter, name: str
) -> None:
    write = WRITES[name](tmp_path)
    with slow_file(tmp_path / name) as slow:
        writing = asyncio.create_task(writer.run(write))
        await eventually(slow.reached.is_set)
        assert not writing.done(), "the write is in progress while the loop runs"
        slow.respond()
        await writing
    assert b"g1" in slow.content()


async def test_the_event_loop_goes_on_while_a_line_of_metrics_is_written(tmp_path: Path) -> None:
    reached, responds = threading.Event(), threading.Event()

    class Slow(MetricsLog):
        def append(self, line: Any) -> None:
            reached.set()
            responds.wait(5)
            super().append(line)

    log = Recorder(Slow(tmp_path), TrajectoryFiles(tmp_path), Silent(), dict, lambda: 3)
    writing = asyncio.create_task(log.step(1, {"loss": 0.5}))
    await eventually(reached.is_set)
    assert not writing.done()
    assert read_metrics(tmp_path) == []
    responds.set()
    await writing
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.5]


async def test_writes_happen_in_the_order_of_the_calls(writer: FileWriter) -> None:
    seen: list[int] = []
    await asyncio.gather(*(writer.run(seen.append, number) for number in range(200)))
    assert seen == list(range(200))


async def test_a_full_disk_is_the_error_of_the_caller_and_names_the_file(
    tmp_path: Path, writer: FileWriter
) -> None:
    for name, make in WRITES.items():
        write = make(tmp_path)
        (tmp_path / name).symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left") as caught:
            await writer.run(write)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / name))
    assert await writer.run(lambda: "later writes are made") == "later writes are made"


async def test_a_cancelled_caller_ends_after_its_write(tmp_path: Path, writer: FileWriter) -> None:
    files = TrajectoryFiles(tmp_path)
    with slow_file(tmp_path / "trajectories" / "failed.jsonl") as slow:
        first = asyncio.create_task(writer.run(files.append, [episode("g1")], State.FAILED))
        second = asyncio.create_task(writer.run(files.append, [episode("g2")], State.STALE))
        await eventually(slow.reached.is_set)
        first.cancel(), second.cancel()
        await asyncio.sleep(0)
        assert not any(caller.done() for caller in (first, second))
        slow.respond()
        for cancelled in (first, second):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
    assert b"g1" in slow.content()
    lines = read_lines(tmp_path / "trajectories" / "stale.jsonl")
    assert [line["group_id"] for line in lines] == ["g2"], "a write that waits for its turn is made, too"


async def test_an_error_is_not_lost_if_its_caller_is_cancelled(writer: FileWriter) -> None:
    reached, responds = threading.Event(), threading.Event()

    def fail() -> None:
        reached.set()
        responds.wait(5)
        raise OSError(errno.ENOSPC, "No space left on device", "here")

    writing = asyncio.create_task(writer.run(fail))
    await eventually(reached.is_set)
    writing.cancel()
    await asyncio.sleep(0)
    responds.set()
    with pytest.raises(OSError, match="No space left"):
        await writing


async def test_closing_waits_for_the_writes_that_were_called(tmp_path: Path) -> None:
    writer, files = FileWriter(), TrajectoryFiles(tmp_path)
    with slow_file(tmp_path / "trajectories" / "failed.jsonl") as slow:
        writing = asyncio.create_task(writer.run(files.append, [episode()], State.FAILED))
        await eventually(slow.reached.is_set)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        assert not closing.done()
        slow.respond()
        await closing
    await writing
    assert b"g1" in slow.content()
    with pytest.raises(RuntimeError):
        await writer.run(print)


async def test_a_group_that_is_erased_while_its_batch_is_written_is_erased_there_too(
    tmp_path: Path, writer: FileWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TrajectoryFiles(tmp_path)
    reached, goes_on = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def held(name: str) -> Iterator[None]:
        """The episodes to write are chosen, and the file does not exist yet."""
        if name == "trajectories.step":
            reached.set()
            goes_on.wait(5)
        yield

    monkeypatch.setattr(failpoints, "around", held)
    writing = asyncio.create_task(writer.run(files.batch, batch("g1", "g2"), 1))
    await eventually(reached.is_set)
    erasing = asyncio.create_task(files.erase({"g1"}, writer))
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(writing, erasing)
    lines = read_lines(tmp_path / "trajectories" / "step_000001.jsonl")
    assert [line["group_id"] for line in lines] == ["g2"]
