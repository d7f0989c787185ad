"""A run's messages: errors when the operating system refuses an operation, and lost feedback at a resume."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidegate.config import load_settings
from tidegate.errors import StorageError, TidegateError
from tidegate.observer import Silent
from tidegate.trainer import run as run_module
from tidegate.trainer.run import Run


async def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> TidegateError:
    """The error of a run in which this one comes up."""

    async def assemble(*_: object) -> None:
        raise error

    monkeypatch.setattr(Run, "_assemble", assemble)
    settings = load_settings(None, ["--model.path=x", f"--run.dir={tmp_path}", "--run.name=run"])
    with pytest.raises(TidegateError) as found:
        await Run(settings, cast(Any, None), Silent()).train()
    assert found.value.__cause__ is error
    return found.value


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "failed: TimeoutError; "),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            r"failed: ConnectionRefusedError: .*refused; ",
        ),
        (socket.gaierror(socket.EAI_NONAME, "name not known"), r"failed: gaierror: .*name not known; "),
    ],
)
async def test_what_is_no_fault_of_a_disk_keeps_its_own_words_and_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    found = await said(tmp_path, monkeypatch, error)
    assert not isinstance(found, StorageError)
    found_words = str(found)
    assert re.search(words, found_words), found_words
    assert "free some space" not in found_words
    log = tmp_path / "run" / "logs" / "trainer-0.log"
    assert str(log) in found_words
    assert "in assemble" in log.read_text()


@pytest.mark.parametrize(
    ("number", "file", "words"),
    [
        (errno.ENOSPC, None, "run: No space left on device; free some space, then"),
        (errno.EDQUOT, "here", "here: Disk quota exceeded; free some space, then"),
        (errno.EROFS, None, "run: Read-only file system; make it accessible, then"),
        (errno.EACCES, "there", "there: Permission denied; make it accessible, then"),
    ],
)
async def test_files_that_cannot_be_had_are_said_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, file: str | None, words: str
) -> None:
    found = await said(tmp_path, monkeypatch, OSError(number, os.strerror(number), file))
    assert isinstance(found, StorageError)
    assert words in str(found)


@pytest.mark.parametrize(
    ("source", "lost", "noted"),
    [("client", "3 of 4", True), ("client", None, False), ("local", "3 of 4", False)],
)
async def test_a_resumed_run_notes_the_feedback_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, lost: str | None, noted: bool
) -> None:
    words = ["--model.path=x", f"--run.dir={tmp_path}", "--run.name=run", f"--agent.source={source}"]
    settings = load_settings(None, [*words, *(["--gateway.keys=keys"] if source == "client" else [])])
    monkeypatch.setattr(run_module, "audit_run", lambda _: None)
    monkeypatch.setattr(run_module, "summary", lambda _: "audited")
    monkeypatch.setattr(run_module, "requested_lifts", lambda _: set())
    seen: list[str] = []
    observer = Silent()
    monkeypatch.setattr(observer, "note", seen.append)
    asked: list[tuple[int, int]] = []
    failures = SimpleNamespace(quarantined=set())
    resumed = SimpleNamespace(
        continued=0, stale=[], cancelled=[], admission=SimpleNamespace(failures=failures),
        lost_feedback=lambda step, every: asked.append((step, every)) or lost,
    )  # fmt: skip
    start = SimpleNamespace(step=5, version=6)
    run = Run(settings, cast(Any, None), observer)
    monkeypatch.setattr(run, "start", start, raising=False)
    await run._report_resume(cast(Any, resumed), "")
    assert (lost in seen) is noted
    if source == "client":
        assert asked == [(5, settings.trainer.checkpoint_every)]
