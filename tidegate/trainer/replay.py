"""Training again from a run's recorded trajectories, without engines, agents or a gateway.

With the run's own settings every loss and every parameter comes out bit for bit: what is trained on is in
the files, and the step is deterministic for a thread count and a microbatch layout, both of which are
settings. With other settings it answers 'what if': the same batches under another loss or learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import TidegateError
from tidegate.trainer.batch.batcher import rows_to_train
from tidegate.trainer.batch.credit import GroupCredit
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.trainer.loop import CHANGED
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.records.trajectories import read_lines, recorded, step_files
from tidegate.trainer.start import base_model
from tidegate.types import Group, Trajectory

COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "mismatch_kl", "lag_kl", "clip_fraction", "ess")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step: its metrics as recorded and as they came out now."""

    step: int
    before: dict[str, Any]
    now: dict[str, float]
    same_weights: bool | None
    """As the checkpoint of this step; None where there is none."""

    @property
    def same(self) -> bool:
        """Every compared metric equal, to the last bit, and the weights too."""
        pairs = [(self.before[name], self.now[name]) for name in COMPARED if name in self.before]
        return self.same_weights is not False and all(_equal(*pair) for pair in pairs)


@dataclass(frozen=True, slots=True)
class Replay:
    """The steps after `first` up to `last` (None: the last that was recorded whole), under `settings`."""

    run_dir: Path
    settings: Settings
    first: int = 0
    last: int | None = None

    def run(self, policy: Policy) -> Iterator[Replayed]:
        """Step by step; `policy` is what `start` gave. Raises TidegateError where files are missing."""
        rows = {row["step"]: row for row in read_metrics(self.run_dir)}
        files = step_files(self.run_dir)
        kept = checkpoints.committed(self.run_dir)
        versions = _versions(self.run_dir)
        credit = GroupCredit(self.settings.trainer)
        for step in self.steps():
            if not (step in files and step in rows and step in versions):
                raise TidegateError(f"{self.run_dir}: step {step} was not recorded")
            groups = _groups(files[step])
            fresh = step == 1 or self.settings.trainer.publishes(step - 1)
            version = versions[step] if fresh else CHANGED
            now = policy.update(rows_to_train(groups, credit(groups)), version)
            weights = kept.get(step)
            yield Replayed(step, rows[step], now, None if weights is None else _same_weights(policy, weights))

    def steps(self) -> range:
        """The steps to take. Raises TidegateError where there is none.

        A run that was killed in a step may have its episodes and not its metrics: it ends before that one.
        """
        rows = {row["step"] for row in read_metrics(self.run_dir)}
        last = max(rows & step_files(self.run_dir).keys() & _versions(self.run_dir).keys(), default=0)
        chosen = range(self.first + 1, (last if self.last is None else min(self.last, last)) + 1)
        if not chosen:
            asked = "" if self.last is None else f" up to {self.last}"
            raise TidegateError(
                f"{self.run_dir}: there is no step to take after {self.first}{asked}; its steps are recorded "
                f"up to {last}"
            )
        return chosen

    def start(self) -> Policy:
        """The policy after step `first`: the base model, or that step's checkpoint.

        Raises TidegateError where there is no checkpoint of it.
        """
        settings = self.settings
        if settings.trainer.ranks > 1:
            raise TidegateError(
                f"{self.run_dir} was trained on {settings.trainer.ranks} ranks, whose sums are in another "
                "order than those of the one process that replays it: ask for --set trainer.ranks=1, and "
                "expect the last digits to differ"
            )
        if self.first == 0:
            return Policy.load(settings.model.path.absolute(), settings.trainer, settings.run.seed)
        kept = checkpoints.committed(self.run_dir)
        if self.first not in kept:
            known = ", ".join(map(str, [0, *sorted(kept)]))
            raise TidegateError(
                f"{self.run_dir} keeps no checkpoint of step {self.first}; replay can start from {known}"
            )
        base = base_model(settings, kept[self.first])
        policy = Policy.load(base, settings.trainer, settings.run.seed)
        checkpoints.load(checkpoints.read(kept[self.first]), policy)
        return policy


def _versions(run_dir: Path) -> dict[int, int]:
    """Step → the trainer's version when its batch was cut; of a step that was taken twice, the last time."""
    stepped = (one for one in read_ledger(run_dir / "ledger.jsonl") if one.get("state") == State.STEPPED)
    return {one["step"]: one["version"] for one in stepped if one["kind"] == "group"}


def _groups(path: Path) -> list[Group]:
    """The groups that were stepped on, in the order of the batch."""
    members: dict[str, list[Trajectory]] = {}
    for line in read_lines(path):
        if line["state"] == State.STEPPED.value:
            members.setdefault(line["group_id"], []).append(recorded(line))
    return [Group(name, found[0].task_id, found) for name, found in members.items()]


def _same_weights(policy: Policy, path: Path) -> bool:
    """Whether the policy's weights are those of a directory, bit for bit."""
    theirs = dict(read_model(path).named_parameters())
    return all(theirs[name].equal(tensor.cpu()) for name, tensor in policy.weights().items())


def _equal(before: Any, now: float) -> bool:
    return before == now or (before is None and not math.isfinite(now))
