"""Groups that are dropped for a batch: written when they are dropped, and once, over a kill and a resume."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.trajectories import TrajectoryFiles, read_lines
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Group


def group(name: str) -> Group:
    members = [make_trajectory([make_turn(0, None, [1], [2])]) for _ in range(2)]
    for slot, member in enumerate(members):
        member.session_id, member.group_id, member.slot, member.reward = f"{name}-{slot}", name, slot, 1.0
    return Group(name, "t", members)


def batch(name: str, *dropped: Group) -> Batch:
    filtered = [(one, State.FILTERED) for one in dropped]
    return Batch(0, [0], [group(name)], filtered, 0.0, 0.0, [[1.0, -1.0]])


def written(files: TrajectoryFiles, name: str = "step_000001.jsonl") -> list[tuple[str, str]]:
    """The (session, state) of each line."""
    return [(line["session_id"], line["state"]) for line in read_lines(files.directory / name)]


def ended(name: str, state: State = State.FILTERED) -> list[tuple[str, str]]:
    return [(f"{name}-{slot}", state.value) for slot in range(2)]


@pytest.fixture
def files(tmp_path: Path) -> TrajectoryFiles:
    return TrajectoryFiles(tmp_path)


def test_a_dropped_group_is_written_before_its_step_and_not_again_with_it(files: TrajectoryFiles) -> None:
    first, second, third = group("a"), group("b"), group("c")
    files.drop(first, State.FILTERED, 1)
    assert written(files) == ended("a")
    files.drop(second, State.STALE, 1)
    files.batch(batch("trained", first, second, third), 1)
    assert written(files) == [
        *ended("a"), *ended("b", State.STALE), *ended("trained", State.STEPPED), *ended("c"),
    ]  # fmt: skip
    files.drop(group("d"), State.FILTERED, 2)
    assert written(files, "step_000002.jsonl") == ended("d")


def test_a_killed_run_keeps_them_and_its_resume_goes_on_in_the_same_file(files: TrajectoryFiles) -> None:
    files.drop(group("a"), State.FILTERED, 1)
    path = files.directory / "step_000001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"state": "filtered", "group_id": "torn')
    files.move_discarded(0, 2)
    assert written(files) == ended("a"), "it is not undone"
    resumed = TrajectoryFiles(files.directory.parent)
    resumed.drop(group("a"), State.FILTERED, 1)
    resumed.drop(group("b"), State.FILTERED, 1)
    assert written(resumed) == [*ended("a"), *ended("b")]
    again = TrajectoryFiles(files.directory.parent)
    again.batch(batch("trained"), 1)
    assert written(again) == [*ended("a"), *ended("b"), *ended("trained", State.STEPPED)]


def test_the_file_of_a_step_that_a_resume_discards_is_moved_with_its_dropped_groups(
    files: TrajectoryFiles,
) -> None:
    files.drop(group("a"), State.FILTERED, 1)
    files.batch(batch("trained"), 1)
    files.drop(group("b"), State.FILTERED, 2)
    files.move_discarded(0, 2)
    assert not list(files.directory.glob("step_*"))
    resumed = TrajectoryFiles(files.directory.parent)
    resumed.batch(batch("other"), 1)
    assert written(resumed) == ended("other", State.STEPPED)


async def test_an_erased_group_is_removed_from_the_file_of_the_next_step(files: TrajectoryFiles) -> None:
    async with FileWriter() as writer:
        for name in ("a", "b"):
            await writer.run(files.drop, group(name), State.FILTERED, 1)
        closed, growing = files._closed()
        path = files.directory / "step_000001.jsonl"
        assert (path in closed, path in growing) == (False, True), "the writer's thread alone replaces it"
        erasing = asyncio.create_task(files.erase({"a"}, writer))
        await writer.run(files.drop, group("c"), State.FILTERED, 1)
        await erasing
        await writer.run(files.batch, batch("trained", group("a")), 1)
    assert written(files) == [*ended("b"), *ended("c"), *ended("trained", State.STEPPED)]


def test_an_erased_group_is_not_written(files: TrajectoryFiles) -> None:
    files.erased.add("a")
    files.drop(group("a"), State.FILTERED, 1)
    assert not (files.directory / "step_000001.jsonl").exists()


def test_a_step_is_on_the_disk_before_its_file_has_its_name(
    files: TrajectoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.directory / "step_000001.jsonl"
    synced: list[tuple[str, bool]] = []

    def note(handle: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, path.exists()))

    monkeypatch.setattr(os, "fsync", note)
    files.batch(batch("trained"), 1)
    assert synced == [("step_000001.jsonl.part", False), ("trajectories", True)]
