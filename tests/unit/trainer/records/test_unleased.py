"""Files of episodes that were never leased, in several parts: written, torn, continued and erased."""

from __future__ import annotations

import builtins
import errno
import json
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.jsonl import nth_part, parts, read_jsonl
from tidegate.trainer.records import trajectories as module
from tidegate.trainer.records.trajectories import TrajectoryFiles, decode_trajectory
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Trajectory

UNLEASED = (State.FAILED, State.STALE)


def episode(group: str, slot: int = 0) -> Trajectory:
    made = make_trajectory([make_turn(0, None, [1], [2])])
    made.group_id, made.slot, made.metadata = group, slot, {"attempt": f"{group}.{slot}.1"}
    return made


def path_of(run_dir: Path, state: State = State.FAILED) -> Path:
    return run_dir / "trajectories" / f"{state}.jsonl"


def written(path: Path) -> list[str]:
    return [line["attempt"] for line in read_jsonl(path)]


def groups_in(part: Path) -> list[str]:
    return [json.loads(line)["group_id"] for line in part.read_text().splitlines()]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(UNLEASED),
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=6), st.integers(1, 3000), st.booleans()), max_size=5
    ),
)
def test_what_was_appended_is_read_whatever_the_parts_and_kills(
    state: State, lives: list[tuple[list[int], int, bool]]
) -> None:
    """Each life appends groups; a kill then tears the last part, or comes after the next one was created."""
    with tempfile.TemporaryDirectory() as folder:
        path, wanted = path_of(Path(folder), state), []
        for sizes, part_bytes, began in lives:
            files = TrajectoryFiles(Path(folder), part_bytes)
            for size in sizes:
                group = [episode(f"g{len(wanted)}", slot) for slot in range(size)]
                files.append(group, state)
                wanted += [one.metadata["attempt"] for one in group]
                assert written(path) == wanted
            if began and parts(path):
                nth_part(path, len(parts(path)) + 1).touch()
            else:
                with open((parts(path) or [path])[-1], "ab") as file:
                    file.write(b'{"state":"fail')
            TrajectoryFiles(Path(folder))
            assert all(part.read_bytes().endswith(b"\n") or not part.stat().st_size for part in parts(path))
            assert written(path) == wanted


@pytest.mark.parametrize("state", UNLEASED)
def test_a_full_part_is_followed_by_another_and_a_group_is_in_one(tmp_path: Path, state: State) -> None:
    files = TrajectoryFiles(tmp_path, part_bytes=2000)
    for number in range(6):
        files.append([episode(f"g{number}", slot) for slot in range(2)], state)
    found = parts(path_of(tmp_path, state))
    assert len(found) > 2
    assert all(part.stat().st_size >= 2000 for part in found[:-1])
    for part in found:
        groups = groups_in(part)
        assert all(groups.count(group) == 2 for group in groups)
    assert decode_trajectory(next(read_jsonl(found[-1]))).slot == 0
    assert not parts(path_of(tmp_path, next(one for one in UNLEASED if one is not state)))


@pytest.fixture
def limit() -> Iterator[Any]:
    """Sets the size at which the system refuses to write on to a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_midway_leaves_a_part_of_whole_lines(tmp_path: Path, limit: Any) -> None:
    """Else the rest of a line would stay for ever in a part to which nothing is appended any more."""
    files = TrajectoryFiles(tmp_path)
    path = path_of(tmp_path)
    files.append([episode("g1")], State.FAILED)
    size = path.stat().st_size
    limit(size + 100)
    with pytest.raises(OSError, match="File too large") as caught:
        files.append([episode("g2")], State.FAILED)
    limit(resource.RLIM_INFINITY)
    assert (caught.value.filename, path.stat().st_size) == (str(path), size)
    files.append([episode("g3")], State.FAILED)
    assert written(path) == ["g1.0.1", "g3.0.1"]


def test_a_part_that_cannot_be_created_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path, plain = TrajectoryFiles(tmp_path, part_bytes=1), path_of(tmp_path), builtins.open
    files.append([episode("g1")], State.FAILED)

    def refuse(name: Any, *arguments: Any, **named: Any) -> Any:
        if name == nth_part(path, 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(name, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left") as caught:
                files.append([episode("g2")], State.FAILED)
    assert caught.value.filename == str(nth_part(path, 2))
    files.append([episode("g3")], State.FAILED)
    assert (parts(path), written(path)) == ([path, nth_part(path, 2)], ["g1.0.1", "g3.0.1"])


async def test_a_group_is_erased_from_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that is appended to is rewritten by the writer of the files, the others beside it."""
    path = path_of(tmp_path, State.STALE)
    files = TrajectoryFiles(tmp_path, part_bytes=1)
    for group in ("me.1", "me.2", "me.1", "me.3"):
        files.append([episode(group)], State.STALE)
    files.append([episode("me.1")], State.FAILED)
    files = TrajectoryFiles(tmp_path)  # the last part goes on
    files.append([episode("me.1"), episode("me.1", 1)], State.STALE)
    by_writer: dict[str, bool] = {}
    replace = Path.replace

    def noted(part: Path, target: Path) -> Path:
        by_writer[target.name] = threading.current_thread().name.startswith("files")
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", noted)
    async with FileWriter() as writer:
        await files.erase({"me.1"}, writer)
        await writer.run(files.append, [episode("me.1"), episode("me.4")], State.STALE)
    assert [groups_in(part) for part in parts(path)] == [[], ["me.2"], [], ["me.3", "me.4"]]
    assert groups_in(path_of(tmp_path)) == []
    assert by_writer == {
        "stale.jsonl": False, "stale.3.jsonl": False, "stale.4.jsonl": True, "failed.jsonl": True,
    }  # fmt: skip
    TrajectoryFiles(tmp_path, part_bytes=1).append([episode("me.5")], State.STALE)
    assert written(path)[-2:] == ["me.4.0.1", "me.5.0.1"], "also after a start, behind an empty part"


async def test_parts_that_are_closed_during_an_erasure_are_erased_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(tmp_path, State.STALE)
    files = TrajectoryFiles(tmp_path, part_bytes=1)
    for group in ("me.1", "me.2", "me.1"):
        files.append([episode(group)], State.STALE)
    erase = module._erase
    async with FileWriter() as writer:

        def erase_slowly(paths: Any, groups: Any) -> None:
            """Episodes are appended before the closed parts are erased, and again before the last one is."""
            for number in range(2):
                files.append([episode("me.1"), episode(f"late.{len(parts(path))}.{number}")], State.STALE)
            erase(paths, groups)

        monkeypatch.setattr(module, "_erase", erase_slowly)
        await files.erase({"me.1"}, writer)
    found = [groups_in(part) for part in parts(path)]
    assert found[:3] == [[], ["me.2"], []]
    assert [one.rpartition(".")[0] for [one] in found[3:]] == ["late.3", "late.4", "late.5", "late.6"]
