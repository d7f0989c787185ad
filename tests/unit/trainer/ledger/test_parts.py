"""A ledger of several parts: written, torn, continued, followed, checked and made durable."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import eventually
from tidegate.errors import LedgerError
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.jsonl import nth_part, parts
from tidegate.trainer.ledger.ledger import Ledger, read_ledger
from tidegate.trainer.start import check_files
from tidegate.viewer.dashboard.tail import Tail
from tidegate.viewer.run_files import objects

SMALL = 200
"""Bytes of a part: two or three entries."""


def enter(ledger: Ledger, number: int) -> None:
    for _ in range(number):
        ledger.record(entry("run", "note", text="x" * (ledger.position % 40)))


def numbers(lines: Any) -> list[int]:
    return [line["seq"] for line in lines]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 400), st.integers(0, 300), st.booleans()), max_size=5
    )
)
def test_what_was_recorded_is_read_whatever_the_parts_and_crashes(
    lives: list[tuple[int, int, int, bool]],
) -> None:
    """Each life writes entries; a crash then tears the last part, or ends it after it began the next one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        tail, followed, wanted = Tail(path), [], 0
        for number, part_bytes, torn, began in lives:
            with Ledger(path, part_bytes) as ledger:
                assert ledger.position == wanted
                enter(ledger, number)
                followed += numbers(tail.objects())
                checksum = ledger.checksum
            wanted += number
            last = parts(path)[-1]
            if began:
                nth_part(path, len(parts(path)) + 1).touch()
            else:
                with last.open("ab") as file:
                    file.write(b'{"seq":' + b"9" * torn)
            assert numbers(read_ledger(path)) == numbers(objects(path)) == list(range(wanted))
            with Ledger(path) as ledger:
                assert (ledger.position, ledger.checksum) == (wanted, checksum)
        assert followed == list(range(wanted))


def test_a_file_that_is_followed_is_read_on_in_its_next_parts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    tail, seen = Tail(path), []
    with Ledger(path, SMALL) as ledger:
        for _ in range(30):
            enter(ledger, 1)
            assert not tail.restarted()
            seen += numbers(tail.objects())
    assert seen == list(range(30))
    assert len(parts(path)) > 5
    assert tail.offset == sum(part.stat().st_size for part in parts(path))
    for part in parts(path):
        part.unlink()
    assert tail.restarted()
    with Ledger(path) as ledger:
        enter(ledger, 2)
    assert numbers(tail.objects()) == [0, 1]


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_damaged_part_is_found_before_a_resume(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, SMALL) as ledger:
        enter(ledger, 12)
        state = {"ledger": ledger.position, "ledger_checksum": ledger.checksum}
    checkpoint = Checkpoint(tmp_path, 1, {**state, "files": {}})
    check_files(tmp_path, checkpoint)
    if damage == "missing":
        parts(path)[-1].unlink()
    else:
        os.truncate(parts(path)[1], parts(path)[1].stat().st_size - 5)
    with pytest.raises(LedgerError, match="cannot be resumed from"):
        check_files(tmp_path, checkpoint)


async def test_all_parts_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def note(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[2])
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    with Ledger(tmp_path / "ledger.jsonl", SMALL) as ledger:
        enter(ledger, 8)
        names = [part.name for part in parts(ledger.path)]
        assert len(names) > 2
        await asyncio.gather(ledger.durable(), ledger.durable())
        assert synced.count("ledger.jsonl") == synced.count(tmp_path.name) == 1
        assert set(synced) == {*names, tmp_path.name}
        synced.clear()
        await ledger.durable()
        assert synced == [names[-1]]


async def test_nothing_is_recorded_after_a_sync_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it once: without this, the next sync would pass."""
    failures = [OSError(errno.EIO, "Input/output error")]

    def fail_once(handle: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(os, "fsync", fail_once)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        enter(ledger, 2)
        with pytest.raises(LedgerError, match=r"cannot sync: Input/output error; .*--resume"):
            await ledger.durable()
        with pytest.raises(LedgerError, match="cannot sync"):
            enter(ledger, 1)
        with pytest.raises(LedgerError, match="cannot sync"):
            await ledger.durable()
    assert numbers(read_ledger(ledger.path)) == [0, 1]


async def test_a_sync_that_fails_after_its_caller_was_cancelled_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, fails = threading.Event(), threading.Event()

    def fail_once(handle: int) -> None:
        if not fails.is_set():
            reached.set()
            assert fails.wait(5)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_once)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        enter(ledger, 2)
        syncing = asyncio.create_task(ledger.durable())
        await eventually(reached.is_set)
        syncing.cancel()
        await asyncio.sleep(0)
        fails.set()
        with pytest.raises(LedgerError, match="cannot sync"):
            await syncing
        with pytest.raises(LedgerError, match="cannot sync"):
            await ledger.durable()


async def test_a_sync_beside_one_that_fails_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports the failure to one of them."""
    failures = [OSError(errno.EIO, "Input/output error")]

    def fail_once(handle: int) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(os, "fsync", fail_once)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        enter(ledger, 2)
        results = await asyncio.gather(ledger.durable(), ledger.durable(), return_exceptions=True)
    assert [type(result) for result in results] == [LedgerError, LedgerError]


def test_a_part_that_cannot_be_begun_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, 1) as ledger:
        enter(ledger, 1)
        nth_part(path, 2).mkdir()
        with pytest.raises(LedgerError, match="cannot record note"):
            enter(ledger, 1)
        nth_part(path, 2).rmdir()
    with Ledger(path, 1) as ledger:
        enter(ledger, 1)
    assert numbers(read_ledger(path)) == [0, 1]
