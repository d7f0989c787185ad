"""Checkpoints: the state from which a run resumes, committed by a marker file that is written last.

`checkpoints/step_N/` holds the model in Hugging Face format, `trainer.pt` (optimiser, generators, adapter),
with several ranks `optimizer/` (shards of the optimiser's moments), and the marker `COMMITTED`, a JSON
object: `step`, the run's state (ledger position, version, data cursor), `files` (checksum of each file) and
`checksum` (of the marker itself). All files are synced before the marker is renamed into place. A directory
without a marker was left by a killed process: it is ignored, and `prune` removes it.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tidegate import failpoints
from tidegate.errors import CheckpointError
from tidegate.trainer.ledger.jsonl import sync
from tidegate.weights import checksum

MARKER = "COMMITTED"
TRAINER_STATE = "trainer.pt"
OPTIMIZER = "optimizer"
_STEP = re.compile(r"step_(\d+)")


class Storable(Protocol):
    """Model and trainer state that can be written."""

    def save_weights(self, directory: Path) -> Path: ...
    def save_state(self, path: Path) -> None: ...


class Restorable(Storable, Protocol):
    """Model and trainer state that can be checkpointed: a `Policy`."""

    def staged(self, directory: Path) -> Storable: ...
    def load_weights(self, directory: Path) -> None: ...
    def load_state_from(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: its directory, step, and the state in its marker."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, int] | None = None
    """Checksums by name; None in markers of earlier versions of Tidegate."""

    def verify(self) -> None:
        """Raises CheckpointError if a file is missing or has changed since the commit."""
        for name, expected in (self.files or {}).items():
            try:
                actual = checksum.of_file(self.path / name)
            except OSError as error:
                raise _damaged(self.path / name, error.strerror or str(error)) from error
            if actual != expected:
                raise _damaged(self.path / name, f"its checksum is {actual}, not {expected}")


def save(run_dir: Path, step: int, policy: Restorable, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step_N/` and commit it with `state` in its marker; returns its path.

    If the step is committed already, its files hold the same policy and only `state` is replaced.

    Raises CheckpointError if it cannot be written, as on a full disk; the incomplete files are removed and
    older checkpoints are kept.
    """
    return begin(run_dir, step, policy, state)()


def begin(run_dir: Path, step: int, policy: Restorable, state: dict[str, Any]) -> Callable[[], Path]:
    """Do the part of `save` that reads the policy, and return the function that does the rest.

    With several ranks the policy may change before that function is called. One rank copies nothing.
    """
    path = _directory(run_dir) / f"step_{step}"
    is_committed = (path / MARKER).exists()
    source = policy if is_committed else policy.staged(path)
    return partial(_write, path, step, source, state, is_committed=is_committed)


def _write(path: Path, step: int, source: Storable, state: dict[str, Any], *, is_committed: bool) -> Path:
    files = read(path).files if is_committed else None
    try:
        if not is_committed:
            with failpoints.around("checkpoint.weights"):
                source.save_weights(path)
            with failpoints.around("checkpoint.state"):
                source.save_state(path / TRAINER_STATE)
            sync_tree(path)
            # The name of the new directory must reach the disk, too.
            sync(path.parent)
        if files is None:
            # Without the marker (it has its own checksum) and the `.COMMITTED.partial` of a killed process.
            found = [file for file in sorted(path.rglob("*")) if file.is_file() and MARKER not in file.name]
            files = {str(file.relative_to(path)): checksum.of_file(file) for file in found}
        _commit(path / MARKER, _marker({**state, "step": step}, files))
    except OSError as error:
        if not is_committed:
            for left in (path, *path.parent.glob(f".{path.name}.*")):
                shutil.rmtree(left, ignore_errors=True)
        raise CheckpointError(_write_error_message(path, error)) from error
    return path


def latest(run_dir: Path) -> Checkpoint | None:
    """Return the committed checkpoint of the highest step, or None if there is none.

    Raises CheckpointError if its marker cannot be read.
    """
    steps = committed(run_dir)
    return read(steps[max(steps)]) if steps else None


def live(run_dir: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the weights that were live when this one was written, mostly itself.

    Raises CheckpointError if it is missing or its marker cannot be read.
    """
    step = checkpoint.state.get("live_step")
    if step in (None, checkpoint.step):
        return checkpoint
    if (path := committed(run_dir).get(step)) is None:
        raise CheckpointError(
            f"{checkpoint.path}: the live weights are those of step {step}, whose checkpoint is missing; "
            f"remove {checkpoint.path} to resume from the checkpoint before it"
        )
    return read(path)


def load(checkpoint: Checkpoint, policy: Restorable) -> None:
    """Restore the policy; on one thread, its next step is then bit-identical.

    Raises CheckpointError if files are missing or belong to another model.
    """
    # First: with an adapter the weights follow from the state, and are only compared with the files.
    policy.load_state_from(checkpoint.path / TRAINER_STATE)
    policy.load_weights(checkpoint.path)


def prune(run_dir: Path, keep: int, protect: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, their live weights, and those of the steps in `protect`.

    The marker is removed first, so that a half-removed checkpoint is not committed. Directories without a
    marker are removed too. Returns the removed paths.
    """
    checkpoints = committed(run_dir)
    newest = sorted(checkpoints, reverse=True)[:keep]
    keep_steps = {*newest, *protect, *(_live_step(checkpoints[step]) for step in newest)}
    removed = [path for step, path in sorted(checkpoints.items()) if step not in keep_steps]
    for path in removed:
        remove(path)
    # `*`: a killed process may also have left `.step_N.partial`.
    unmarked = [path for path in _directory(run_dir).glob("*step_*") if not (path / MARKER).exists()]
    for path in unmarked:
        with failpoints.around("checkpoint.removed"):
            shutil.rmtree(path, ignore_errors=True)
    return unmarked


def _live_step(path: Path) -> int | None:
    """Return the step of a checkpoint's live weights; None if its marker has none, or is damaged."""
    try:
        return read(path).state.get("live_step")
    except CheckpointError:
        return None


def remove(path: Path) -> None:
    """Remove a checkpoint's marker, so that it is not committed; `prune` removes its files."""
    with failpoints.around("checkpoint.unmarked"):
        (path / MARKER).unlink()
    sync(path)


def sync_tree(directory: Path) -> None:
    """Sync a directory and everything in it to disk."""
    for path in [*directory.rglob("*"), directory]:
        # Before `prune` removes files: the loss of the machine must not leave a marker without them.
        sync(path)


def _commit(marker: Path, text: str) -> None:
    partial = marker.with_name(f".{MARKER}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        # Before it has its name: the loss of the machine must not leave an empty marker.
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
    """Return the directories of the committed checkpoints, by step."""
    directories = {}
    for path in _directory(run_dir).glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / MARKER).exists():
            directories[int(match[1])] = path
    return directories


def read(path: Path) -> Checkpoint:
    """Read a committed checkpoint's marker. Raises CheckpointError."""
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
    # NaN is not JSON: other programs could not read the marker.
    return json.dumps({**state, "files": files, "checksum": _checksum(state, files)}, allow_nan=False)


def _checksum(state: dict[str, Any], files: dict[str, int] | None) -> int:
    return zlib.crc32(json.dumps([state, files], sort_keys=True).encode())


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is damaged ({why}); remove {file.parent} to resume from the checkpoint before it"
    )


def _write_error_message(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{path}: the disk is full; older checkpoints are untouched. Free space, or lower "
            "trainer.keep_checkpoints, and continue with --resume"
        )
    return f"{path} cannot be written: {error}; older checkpoints are untouched"
