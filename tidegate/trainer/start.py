"""The start of a run: at the base model, or at the newest checkpoint with the state in the ledger.

The files of a run are checked before it is resumed.
"""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson

from tidegate.config import SERVICE_SETTINGS, Settings
from tidegate.errors import ConfigError, LedgerError, NothingToDoError
from tidegate.service.serve import write_atomically
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.jsonl import complete_lines
from tidegate.trainer.ledger.state import LedgerState, read_ledger_state
from tidegate.trainer.preflight import check_model, check_trained_policies
from tidegate.trainer.records.metrics import reached, read_metrics

Resume = bool | Literal["auto"]
"""Whether to continue a run; `auto`: if there is one."""


@dataclass(slots=True)
class Start:
    """Weights that engines start with, their version, and the step after which training continues."""

    weights: Path
    step: int = 0
    version: int = 0
    past: LedgerState = field(default_factory=LedgerState)
    checkpoint: checkpoints.Checkpoint | None = None
    lift_quarantine: bool = False
    """Issue quarantined tasks again."""
    least_epoch: int = 1
    """Lower limit of the number of this start."""

    @classmethod
    def of(cls, settings: Settings, resume: Resume) -> Start:
        """Return where the run starts.

        Raises ConfigError if the directory holds a run that is not resumed, none to resume, or one of another
        model, and NothingToDoError if the run has taken all its steps or reached `trainer.until`.
        """
        run_dir = settings.run_dir.absolute()
        used = (run_dir / "ledger.jsonl").exists() or bool(checkpoints.committed(run_dir))
        if not resume or (resume == "auto" and not used):
            if used:
                raise ConfigError(
                    f"{settings.run_dir} holds a run already: continue it (--resume), choose another "
                    "run.name, or set it aside (--fresh)"
                )
            epoch = _first(settings, 1)
            return cls(settings.model.path.absolute(), version=_least_version(settings), least_epoch=epoch)
        if not used:
            raise ConfigError(f"{settings.run_dir} holds no run to resume; leave --resume out to start one")
        checkpoint = checkpoints.latest(run_dir)
        check_model(settings.run_dir, settings.model.path, None if checkpoint is None else checkpoint.path)
        if checkpoint is not None:
            check_trained_policies(settings)
        check_files(run_dir, checkpoint)
        ledger = run_dir / "ledger.jsonl"
        past = read_ledger_state(ledger) if ledger.exists() else LedgerState()
        # Earlier starts have no version if each failed before its entry in the ledger.
        version = past.highest_version + 1 if past.publishes else _least_version(settings)
        if checkpoint is None:
            start = cls(settings.model.path.absolute(), 0, version, past)
        else:
            live = checkpoints.live(run_dir, checkpoint)
            # `check_files` has verified the newest checkpoint alone.
            if live.step != checkpoint.step:
                live.verify()
            start = cls(live.path, checkpoint.step, version, past, checkpoint)
        start.least_epoch = _first(settings, 1)
        past.discard_after(start.position)
        if start.open_groups():
            return start
        if (target := reached(run_dir, settings.trainer, start.step)) is not None:
            raise NothingToDoError(
                f"the run in {settings.run_dir} is complete: {target}. To continue, raise trainer.until"
            )
        if start.step >= settings.trainer.steps:
            how = "" if (settings.run_dir / SERVICE_SETTINGS).exists() else "--resume "
            raise NothingToDoError(
                f"the run in {settings.run_dir} has taken {start.step} steps, and trainer.steps = "
                f"{settings.trainer.steps}: nothing is left to do. To continue, raise the limit: "
                f"{how}--trainer.steps {2 * start.step}"
            )
        return start

    @property
    def epoch(self) -> int:
        """Number of this start of the run."""
        return max(self.past.epoch + 1, self.least_epoch)

    @property
    def position(self) -> int:
        """Ledger position in the marker that the run resumes from; 0 without one, as nothing is committed."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["ledger"])

    def open_groups(self) -> set[str]:
        """Return the groups that may continue if their tokens are kept."""
        return {*self.past.live(), *self.past.discarded_groups()}


def _least_version(settings: Settings) -> int:
    """Return the least version of a new run: the version of a standing service's engines, if there is one."""
    served = first_version(settings.run_dir.absolute())
    return _first(settings, 0) if served is None else served


def _first(settings: Settings, number: int) -> int:
    """Return the first version or epoch of a new run.

    A gateway that runs already (`gateway.url`) may have been led by other runs, whose versions and epochs
    must be lower; there they begin at the Unix time.
    """
    return number if settings.gateway.url is None else int(time.time())


def base_model(settings: Settings, weights: Path) -> Path:
    """Return the model to load a policy from that starts with `weights`.

    With LoRA it is the run's original model, as an adapter cannot be separated from merged weights.
    """
    return settings.model.path.absolute() if settings.trainer.lora.rank else weights


_WEIGHTS = re.compile(r"(?:delta-)?v(\d+)")


class _InconsistentLedger(Exception):
    """The ledger lacks entries or has changed entries."""


def check_files(run_dir: Path, checkpoint: Checkpoint | None) -> None:
    """Compare the checkpoint with its checksums, and the ledger with the checkpoint and published versions.

    Raises CheckpointError, or LedgerError if ledger entries are missing or changed: their versions would be
    reused for other weights.
    """
    if checkpoint is not None:
        checkpoint.verify()
    ledger = run_dir / "ledger.jsonl"
    try:
        highest = _check_entries(ledger, checkpoint)
        if (published := _published(run_dir)) > highest:
            raise _InconsistentLedger(
                f"version {published} was published, but its highest version is {highest}"
            )
    except _InconsistentLedger as error:
        weights = "" if checkpoint is None else f" --model.path {checkpoint.path}"
        raise LedgerError(
            f"{ledger} cannot be resumed from: {error}. Restore a complete copy of the file, or continue "
            f"as a new run: tidegate train {run_dir / 'config.toml'}{weights} --run.name NEW"
        ) from error


def _check_entries(ledger: Path, checkpoint: Checkpoint | None) -> int:
    """Check entry numbers and the checksum of entries before the checkpoint; returns the highest version."""
    state = {} if checkpoint is None else checkpoint.state
    position, count, highest, checksum = int(state.get("ledger", 0)), 0, -1, 0
    for line in complete_lines(ledger):  # an incomplete last line was never acted on
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _InconsistentLedger(f"line {count + 1} is damaged ({error})") from error
        if entry.get("seq") != count:
            raise _InconsistentLedger(f"line {count + 1} is entry {entry.get('seq')}, not {count}")
        if entry.get("event") in ("started", "publishing"):
            highest = max(highest, entry["version"])
        count += 1
        if count <= position:
            checksum = zlib.crc32(line, checksum)
    if count < position:
        raise _InconsistentLedger(f"it has {count:,} entries, but had {position:,} at the checkpoint")
    if checksum != state.get("ledger_checksum", checksum):
        raise _InconsistentLedger(f"its first {position:,} entries were changed since the checkpoint")
    return highest


def _published(run_dir: Path) -> int:
    """Return the highest version in metrics and published weights; −1 if there is none."""
    matches = (_WEIGHTS.fullmatch(path.name) for path in (run_dir / "weights").glob("*v*"))
    written = (int(match[1]) for match in matches if match)
    return max([-1, *written, *(int(line["version"]) for line in read_metrics(run_dir))])


FIRST_VERSION = "first_version"
"""File in the run directory, with the version of the model with which a standing service starts.

Its engines serve clients before the first trainer has started. What they sample then can be trained on only
if the trainer uses the same version for these weights.
"""


def set_first_version(run_dir: Path) -> int:
    """Returns the version in the file, which it writes if there is none: 0."""
    version = first_version(run_dir)
    if version is None:
        version = 0
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / FIRST_VERSION, str(version))
    return version


def first_version(run_dir: Path) -> int | None:
    """Returns the version in the file; None if the run's engines are not those of a standing service."""
    try:
        return int((run_dir / FIRST_VERSION).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
