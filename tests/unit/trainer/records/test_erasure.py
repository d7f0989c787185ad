"""Erasure of clients' conversations from a run's files: what is removed, kept, repeated and never written."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.envs.judge.cache import ReplyCache
from tidegate.errors import GatewayError
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.ledger.state import LedgerState
from tidegate.trainer.records.erasure import Erasure
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Group


@dataclass
class Gateway:
    erased: list[str] = field(default_factory=list)
    down: bool = False
    on_call: Callable[[], object] = lambda: None
    acknowledged: list[str] = field(default_factory=list)

    async def erased_groups(self) -> list[str]:
        self.on_call()
        if self.down:
            raise GatewayError("it restarts")
        return self.erased

    async def acknowledge_erasures(self, groups: list[str]) -> None:
        self.acknowledged += groups


def save(files: TrajectoryFiles, *groups: str) -> None:
    for group in groups:
        trajectory = make_trajectory([make_turn(0, None, [1], [2])])
        trajectory.group_id = group
        trajectory.metadata = {"mentions": "me.1"}
        files.append([trajectory], State.STALE)


def step_file(files: TrajectoryFiles, name: str, *groups: str) -> Path:
    path = files.directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"group_id": group, "state": "stepped"}) + "\n" for group in groups))
    return path


def groups_in(path: Path) -> list[str]:
    return [json.loads(line)["group_id"] for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> TrajectoryFiles:
    return TrajectoryFiles(tmp_path)


def erasure(gateway: Gateway, files: TrajectoryFiles, book: list[Any], *done: str) -> Erasure:
    return Erasure(
        gateway=cast(Any, gateway), files=files, judge=files.directory.parent / "judge.sqlite",
        writer=FileWriter(),
        ledger=cast(Any, SimpleNamespace(record=book.append, durable=partial(kept, book))),
        done=set(done), note=lambda _: None,
    )  # fmt: skip


async def kept(book: list[Any]) -> None:
    """Stands for the ledger's `durable`."""
    book.append("durable")


async def test_a_group_is_removed_from_every_file_and_never_written_again(files: TrajectoryFiles) -> None:
    save(files, "me.1", "me.2", "me.11")
    step = step_file(files, "step_000001.jsonl", "me.1", "me.2")
    undone = step_file(files, "taken_back/2_step_000002.jsonl", "me.1")
    untouched = step_file(files, "step_000003.jsonl", "me.3")
    before, book = untouched.stat().st_mtime_ns, []
    await erasure(Gateway(["me.1"]), files, book).poll()
    stale = files.directory / "stale.jsonl"
    assert groups_in(stale) == ["me.2", "me.11"], "others whose lines contain the id are kept"
    assert (groups_in(step), groups_in(undone)) == (["me.2"], [])
    assert untouched.stat().st_mtime_ns == before
    save(files, "me.1", "me.4")
    assert groups_in(stale) == ["me.2", "me.11", "me.4"]
    assert book == [entry("run", "erased", group="me.1"), "durable"]
    assert not list(files.directory.rglob("*.part"))


async def test_each_group_has_one_entry_and_a_gateway_that_restarts_is_asked_again(
    files: TrajectoryFiles,
) -> None:
    gateway, book = Gateway(["me.1"]), []
    following = erasure(gateway, files, book)
    await following.poll()
    gateway.down = True
    await following.poll()
    gateway.down, gateway.erased = False, ["me.1", "me.2"]
    await following.poll()
    assert [line["group"] for line in book if line != "durable"] == ["me.1", "me.2"]


async def test_the_judges_replies_are_erased_and_none_are_stored_later(files: TrajectoryFiles) -> None:
    """Another process, which serves the judge, has the database open."""
    path = files.directory.parent / "judge.sqlite"
    cache = ReplyCache(path)
    cache.put("one", "a secret of anna", "me.1")
    cache.put("both", "both", "me.1")
    assert cache.get("both", "me.2") == "both"
    cache.put("eval", "evaluation")
    await erasure(Gateway(["me.1"]), files, []).poll()
    assert [cache.get(key, "me.2") for key in ("one", "both", "eval")] == [None, "both", "evaluation"]
    cache.put("late", "a secret of anna", "me.1")
    assert (cache.get("late", "me.1"), cache.get("both", "me.1")) == (None, "both")
    assert not any(b"secret" in file.read_bytes() for file in path.parent.glob("judge.sqlite*"))
    await erasure(Gateway(["me.1", "me.2"]), files, []).poll()
    assert [cache.get(key) for key in ("both", "eval")] == [None, "evaluation"]
    cache.close()


async def test_a_crash_between_entry_and_files_is_made_good_at_the_next_start(files: TrajectoryFiles) -> None:
    past = LedgerState()
    past.apply(entry("run", "erased", group="me.1"))
    step = step_file(files, "step_000001.jsonl", "me.1", "me.2")
    cache = ReplyCache(files.directory.parent / "judge.sqlite")
    cache.put("one", "reply", "me.1")
    polled = asyncio.Event()
    gateway = Gateway()
    gateway.on_call = polled.set
    watching = asyncio.create_task(erasure(gateway, files, [], *past.erased).watch())
    async with asyncio.timeout(10):
        await polled.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (groups_in(step), cache.get("one")) == (["me.2"], None)
    cache.close()


async def test_a_group_that_waits_for_a_batch_is_withdrawn(files: TrajectoryFiles) -> None:
    withdrawn: list[str] = []

    async def withdraw(groups: Collection[str]) -> None:
        withdrawn.extend(groups)

    following = erasure(Gateway(["me.1"]), files, [])
    following.withdraw = withdraw
    await following.poll()
    assert withdrawn == ["me.1"]


async def test_the_next_steps_file_is_erased_by_its_writer_after_a_resume(files: TrajectoryFiles) -> None:
    """Else the erasure and the step, which adds its batch to the file, could undo each other."""
    closed = step_file(files, "step_000004.jsonl", "me.1")
    for group in ("me.1", "me.2"):
        trajectory = make_trajectory([make_turn(0, None, [1], [2])])
        trajectory.group_id = group
        files.drop(Group(group, "t", [trajectory]), State.STALE, 5)
    threads: dict[str, bool] = {}
    replace, main = Path.replace, FileWriter()

    def noted(path: Path, target: Path) -> Path:
        threads[target.name] = threading.current_thread().name.startswith("files")
        return replace(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", noted)
        async with main as writer:
            await TrajectoryFiles(files.directory.parent).erase({"me.1"}, writer)
    assert (groups_in(closed), groups_in(files.directory / "step_000005.jsonl")) == ([], ["me.2"])
    assert threads == {"step_000004.jsonl": False, "step_000005.jsonl": True}
