"""`checkpoints/best`: the policy with the highest held-out reward so far, in Hugging Face format.

It is a link to a directory that is complete before the link is replaced, so that `best` always holds a
complete model, even after a crash. It is never pruned. A resumed run reads its `best.json` (`step`,
`version`, `eval/reward`).
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidegate import failpoints
from tidegate.errors import CheckpointError
from tidegate.trainer.checkpoint.checkpoint import MARKER, OPTIMIZER, TRAINER_STATE, sync_tree
from tidegate.weights import delta_files
from tidegate.weights.files import ADAPTER_CONFIG

LINK = "best"
RECORD = "best.json"


@dataclass(slots=True)
class BestCheckpoint:
    """The best policy in a run's `checkpoints/`; `reward` is None if there is none yet."""

    directory: Path
    reward: float | None = None

    @classmethod
    def open(cls, run_dir: Path) -> BestCheckpoint:
        """Open a run's best checkpoint. Raises CheckpointError if its record cannot be read."""
        directory = run_dir / "checkpoints"
        record = directory / LINK / RECORD
        if not record.exists():
            return cls(directory)
        try:
            return cls(directory, float(json.loads(record.read_text(encoding="utf-8"))["eval/reward"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{record} cannot be read ({error}); remove {directory / LINK} to continue without it"
            ) from error

    def update_if_better(self, weights: Path, step: int, version: int, reward: float) -> bool:
        """Copy evaluated weights to `best`, unless an earlier policy has a higher reward.

        Returns whether they were copied. Raises OSError, WeightsError.
        """
        # Of equal rewards the newer policy is kept.
        if self.reward is not None and reward < self.reward:
            return False
        place = self.directory / f"{LINK}-v{version}-step{step}"  # versions are unique
        shutil.rmtree(place, ignore_errors=True)
        try:
            with failpoints.around("best.copied"):
                _copy_models(weights, place)
                place.chmod(0o700)  # the base model's directory may be open to all
                record = {"step": step, "version": version, "eval/reward": reward}
                (place / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
                sync_tree(place)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._replace_link(place)
        self.reward = reward
        return True

    def _replace_link(self, place: Path) -> None:
        link, new_link = self.directory / LINK, self.directory / f".{LINK}.partial"
        # A killed process may have left it, and `symlink_to` replaces nothing.
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(place.name)
        with failpoints.around("best.link"):
            os.replace(new_link, link)
        for old in self.directory.glob(f"{LINK}-*"):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)


def _copy_models(weights: Path, place: Path) -> None:
    """Copy whole models: that of a version or a checkpoint, or of several policies those of each."""
    if delta_files.is_delta(weights):
        delta_files.materialise(weights, place)
    elif (weights / ADAPTER_CONFIG).is_file():
        from tidegate.trainer.checkpoint.huggingface import write_merged  # imports torch

        write_merged(weights, place)
    elif policies := _policies_in(weights):
        place.mkdir()
        for own in policies:
            _copy_models(own, place / own.name)
    else:
        ignored = shutil.ignore_patterns(MARKER, TRAINER_STATE, OPTIMIZER, RECORD)
        shutil.copytree(weights, place, ignore=ignored, copy_function=shutil.copyfile)


def _policies_in(weights: Path) -> list[Path]:
    """Return the directories of several policies; none in that of a model, which may contain others."""
    if (weights / "config.json").is_file():
        return []
    return [
        path
        for path in (*weights.glob("*/"), *weights.glob("*/*/"))  # the latter of policies that share engines
        if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    ]
