"""Where a run starts: at the base model, or at the newest checkpoint with the state in the ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tidegate.config import SERVICE_SETTINGS, Settings
from tidegate.errors import ConfigError, NothingToDoError
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.integrity import check_files
from tidegate.trainer.ledger.state import LedgerState, read_ledger_state
from tidegate.trainer.preflight import check_model, check_trained_policies
from tidegate.trainer.publish.first_version import first_version
from tidegate.trainer.records.metrics import reached

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
            return cls(settings.model.path.absolute(), version=_first_version(settings), least_epoch=epoch)
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
        version = past.highest_version + 1 if past.publishes else _first_version(settings)
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


def _first_version(settings: Settings) -> int:
    """Return the first version of a run; that of its engines if they are those of a standing service."""
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
