"""Checkpoints: everything a run needs to go on, made valid by one marker that is written last.

`checkpoints/step_N/` holds the model in Hugging Face format, `trainer.pt` (optimiser, generators, an adapter)
and the marker `COMMITTED`, a JSON object: `step`, whatever else the run must remember (the ledger's position,
the version, the data cursor), `files` (the checksum of each file) and `checksum` (of the marker itself). All
files are on disk before the marker is, and the marker appears by a rename, so that it is there in full or not
at all. A directory without one was left by a killed process: it is ignored, and removed by the next `prune`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tidegate import failpoints
from tidegate.errors import CheckpointError
from tidegate.weights import checksum

MARKER = "COMMITTED"
TRAINER_STATE = "trainer.pt"
_STEP = re.compile(r"step_(\d+)")


class Restorable(Protocol):
    """What is checkpointed: `trainer.policy.Policy`."""

    def save_weights(self, directory: Path) -> Path: ...
    def save_state(self, path: Path) -> None: ...
    def load_weights(self, directory: Path) -> None: ...
    def load_state_from(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: where it is, after which step, and what its marker says."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, int] | None = None
    """Checksums by name; None: the marker has none, since it was written by an earlier version."""

    def verify(self) -> None:
        """Raises CheckpointError where a file is missing, or is not as it was when it was committed."""
        for name, expected in (self.files or {}).items():
            try:
                found = checksum.of_file(self.path / name)
            except OSError as error:
                raise _damaged(self.path / name, error.strerror or str(error)) from error
            if found != expected:
                raise _damaged(self.path / name, f"its checksum is {found}, not {expected}")


def save(run_dir: Path, step: int, policy: Restorable, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step_N/` and commit it with `state` in its marker; returns its path.

    A step that is committed already keeps its files, for they hold the same policy, and gets the new
    `state`.

    Raises CheckpointError where it cannot be written, a full disk above all: what was written of it is
    removed and older checkpoints stay.
    """
    path = _directory(run_dir) / f"step_{step}"
    whole = (path / MARKER).exists()
    files = read(path).files if whole else None
    try:
        if not whole:
            with failpoints.around("checkpoint.weights"):
                policy.save_weights(path)
            with failpoints.around("checkpoint.state"):
                policy.save_state(path / TRAINER_STATE)
            sync_tree(path)
            sync(path.parent)
        if files is None:
            files = {one.name: checksum.of_file(one) for one in sorted(path.iterdir()) if one.name[0] != "."}
            files.pop(MARKER, None)
        _commit(path / MARKER, _marker({**state, "step": step}, files))
    except OSError as error:
        if not whole:
            shutil.rmtree(path, ignore_errors=True)
        raise CheckpointError(_advice(path, error)) from error
    return path


def latest(run_dir: Path) -> Checkpoint | None:
    """The committed checkpoint of the highest step, None if there is none.

    Raises CheckpointError where its marker cannot be read.
    """
    steps = committed(run_dir)
    return read(steps[max(steps)]) if steps else None


def load(checkpoint: Checkpoint, policy: Restorable) -> None:
    """Put the policy back to where it was; the next step is then the same, bit for bit, on one thread.

    Raises CheckpointError where files are missing or belong to another model.
    """
    policy.load_state_from(checkpoint.path / TRAINER_STATE)
    policy.load_weights(checkpoint.path)


def prune(run_dir: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and those of the steps in `protect`.

    The marker goes first, so that a checkpoint half removed is not taken for one. Directories without a
    marker are removed too. Returns what was removed.
    """
    there = committed(run_dir)
    kept = {*sorted(there, reverse=True)[:keep], *protect}
    doomed = [path for step, path in sorted(there.items()) if step not in kept]
    for path in doomed:
        with failpoints.around("checkpoint.unmarked"):
            (path / MARKER).unlink()
        sync(path)
    unmarked = [path for path in _directory(run_dir).glob("*step_*") if not (path / MARKER).exists()]
    for path in unmarked:
        with failpoints.around("checkpoint.removed"):
            shutil.rmtree(path, ignore_errors=True)
    return unmarked


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Wait until a directory and everything in it is on disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def _commit(marker: Path, text: str) -> None:
    partial = marker.with_name(f".{MARKER}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        with failpoints.around("checkpoint.marker"):
            partial.replace(marker)
        sync(marker.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _directory(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def committed(run_dir: Path) -> dict[int, Path]:
    """The directories of the committed checkpoints, by step."""
    found = {}
    for path in _directory(run_dir).glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / MARKER).exists():
            found[int(match[1])] = path
    return found


def read(path: Path) -> Checkpoint:
    """A committed checkpoint's marker. Raises CheckpointError where it cannot be read."""
    marker = path / MARKER
    try:
        state = json.loads(marker.read_text(encoding="utf-8"))
        expected, files = state.pop("checksum", None), state.pop("files", None)
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(marker, f"it cannot be read: {error}") from error
    if expected is not None and expected != _checksum(state, files):
        raise _damaged(marker, f"its checksum is not {expected}")
    return Checkpoint(path, step, state, files)


def _marker(state: dict[str, Any], files: dict[str, int]) -> str:
    whole = {**state, "files": files, "checksum": _checksum(state, files)}
    return json.dumps(whole, allow_nan=False)


def _checksum(state: dict[str, Any], files: dict[str, int] | None) -> int:
    return zlib.crc32(json.dumps([state, files], sort_keys=True).encode())


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is damaged ({why}); remove {file.parent} to resume from the checkpoint before it"
    )


def _advice(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: the disk is full; older checkpoints are untouched. Free space, or lower "
            "trainer.keep_checkpoints, and go on with --resume"
        )
    return f"{path} cannot be written: {error}; older checkpoints are untouched"
