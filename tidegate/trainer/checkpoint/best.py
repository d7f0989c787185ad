"""`checkpoints/best`: the policy with the highest held-out reward so far, in Hugging Face format.

It is a link to a directory of its own, which is complete before the link is turned to it: so whoever opens
`best`, at any moment and after any crash, finds a whole model. It is never pruned, and holds `best.json`,
from which a resumed run knows it again: `step`, `version`, `eval/reward`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidegate import failpoints
from tidegate.errors import CheckpointError
from tidegate.trainer.checkpoint.checkpoint import MARKER, TRAINER_STATE, sync_tree

LINK = "best"
RECORD = "best.json"


@dataclass(slots=True)
class BestCheckpoint:
    """The best policy of the run whose `checkpoints/` is `directory`; `reward` None: there is none yet."""

    directory: Path
    reward: float | None = None

    @classmethod
    def of(cls, run_dir: Path) -> BestCheckpoint:
        """What is known of a run. Raises CheckpointError where its record cannot be read."""
        directory = run_dir / "checkpoints"
        record = directory / LINK / RECORD
        if not record.exists():
            return cls(directory)
        try:
            return cls(directory, float(json.loads(record.read_text(encoding="utf-8"))["eval/reward"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{record} cannot be read ({error}); remove {directory / LINK} to go on without it"
            ) from error

    def offer(self, weights: Path, step: int, version: int, reward: float) -> bool:
        """Keep a copy of `weights`, as they were evaluated, unless an earlier policy was better.

        Of equals the newer one is kept. Returns whether it is. Raises OSError.
        """
        if self.reward is not None and reward < self.reward:
            return False
        place = self.directory / f"{LINK}-v{version}-step{step}"  # no version ever comes twice
        shutil.rmtree(place, ignore_errors=True)
        try:
            with failpoints.around("best.copied"):
                shutil.copytree(weights, place, ignore=shutil.ignore_patterns(MARKER, TRAINER_STATE, RECORD))
                record = {"step": step, "version": version, "eval/reward": reward}
                (place / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
                sync_tree(place)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._turn_link(place)
        self.reward = reward
        return True

    def _turn_link(self, place: Path) -> None:
        link, fresh = self.directory / LINK, self.directory / f".{LINK}.partial"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(place.name)
        with failpoints.around("best.link"):
            os.replace(fresh, link)
        for old in self.directory.glob(f"{LINK}-*"):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
