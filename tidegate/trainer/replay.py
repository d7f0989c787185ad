"""Replay: repeats a run's training from its recorded trajectories, without engines, agents or a gateway.

With the run's own settings every loss and parameter is reproduced bit for bit: the training data is in the
files, and a step is deterministic for a given thread count and microbatch layout, which are settings. With
other settings a replay trains on the same batches with another loss or learning rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import TidegateError
from tidegate.trainer.batch.batcher import rows_to_train
from tidegate.trainer.batch.credit import BaselineCredit
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.huggingface import read_model
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.state import LedgerState, read_ledger_state
from tidegate.trainer.loop import UNPUBLISHED_VERSION
from tidegate.trainer.policy.policies import Policies, load_policies
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.records.trajectories import decode_trajectory, read_lines, step_files
from tidegate.trainer.start import base_model
from tidegate.types import Group, Trajectory

COMPARED = ("loss", "grad_norm", "learning_rate", "entropy", "mismatch_kl", "lag_kl", "clip_fraction", "ess")


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step: its recorded metrics (`before`) and its replayed ones (`now`)."""

    step: int
    before: dict[str, Any]
    now: dict[str, float]
    same_weights: bool | None
    """Whether the weights equal this step's checkpoint; None if there is none."""

    @property
    def same(self) -> bool:
        """Whether every compared metric and the weights are equal, bit for bit."""
        pairs = [(self.before[name], self.now[name]) for name in COMPARED if name in self.before]
        return self.same_weights is not False and all(_equal(*pair) for pair in pairs)


@dataclass(frozen=True, slots=True)
class Replay:
    """Replays a run under given settings.

    Args:
        run_dir: Directory of the run.
        settings: Settings to train with.
        first: Step to start after: 0, or one with a checkpoint.
        last: Last step to take; None for the last that is completely recorded.
    """

    run_dir: Path
    settings: Settings
    first: int = 0
    last: int | None = None

    def run(self, policy: Policy | Policies) -> Iterator[Replayed]:
        """Take the steps with the policy from `start`. Raises TidegateError if files are missing."""
        rows = {row["step"]: row for row in read_metrics(self.run_dir)}
        files = step_files(self.run_dir)
        saved = checkpoints.committed(self.run_dir)
        past = read_ledger_state(self.run_dir / "ledger.jsonl")
        versions, erased = _versions(past), _erased(past)
        rolled_back = {line["step"] for line in past.roll_backs}
        credit = BaselineCredit(self.settings.trainer)
        if self.first:
            credit.means.restore(checkpoints.read(saved[self.first]).state.get("baseline", {}))
        for step in self.steps():
            if step - 1 in rolled_back and step - 1 != self.first:
                self._continue_from(step - 1, saved, policy, credit)
            if not (step in files and step in rows and step in versions):
                raise TidegateError(f"{self.run_dir}: step {step} was not recorded")
            if step in erased:
                raise TidegateError(
                    f"{self.run_dir}: step {step} cannot be replayed: clients erased {erased[step]} of its "
                    "groups"
                )
            groups = batch_groups(files[step])
            published = step == 1 or self.settings.trainer.is_publish_step(step - 1)
            version = versions[step] if published else UNPUBLISHED_VERSION
            now = policy.update(rows_to_train(groups, credit(groups)), version)
            # That checkpoint was written anew, with the weights to which the policy was rolled back.
            weights = None if step in rolled_back else saved.get(step)
            yield Replayed(step, rows[step], now, None if weights is None else _same_weights(policy, weights))

    def _continue_from(
        self, step: int, saved: Mapping[int, Path], policy: Policy | Policies, credit: BaselineCredit
    ) -> None:
        """Load the checkpoint of a step after which the policy was rolled back."""
        if step not in saved:
            raise TidegateError(
                f"{self.run_dir}: the policy was rolled back after step {step}, and its checkpoint is gone; "
                f"replay from {', '.join(str(kept) for kept in sorted(saved) if kept > step) or 'none'}"
            )
        checkpoint = checkpoints.read(saved[step])
        checkpoints.load(checkpoint, policy)
        credit.means.restore(checkpoint.state.get("baseline", {}))

    def steps(self) -> range:
        """Return the steps to take. Raises TidegateError if there are none.

        A step that was interrupted may have recorded episodes and no metrics: it is left out.
        """
        rows = {row["step"] for row in read_metrics(self.run_dir)}
        versions = _versions(read_ledger_state(self.run_dir / "ledger.jsonl"))
        last = max(rows & step_files(self.run_dir).keys() & versions.keys(), default=0)
        chosen = range(self.first + 1, (last if self.last is None else min(self.last, last)) + 1)
        if not chosen:
            limit = "" if self.last is None else f" up to {self.last}"
            raise TidegateError(
                f"{self.run_dir}: no step to take after {self.first}{limit}; steps are recorded up to {last}"
            )
        return chosen

    def start(self) -> Policy | Policies:
        """Load the policy after step `first`: the base model, or that step's checkpoint.

        Raises TidegateError if that checkpoint does not exist.
        """
        settings = self.settings
        if settings.trainer.backend != "own":
            raise TidegateError(
                f'{self.run_dir} was trained with trainer.backend = "{settings.trainer.backend}": the '
                "service has its weights, and a replay computes its steps here"
            )
        if settings.trainer.ranks > 1:
            raise TidegateError(
                f"{self.run_dir} was trained on {settings.trainer.ranks} ranks, which a replay in one "
                "process cannot reproduce bit for bit: pass --trainer.ranks 1 and expect the last digits "
                "to differ"
            )
        saved = checkpoints.committed(self.run_dir)
        if self.first and self.first not in saved:
            available = ", ".join(map(str, [0, *sorted(saved)]))
            raise TidegateError(
                f"{self.run_dir} has no checkpoint of step {self.first}; replay can start from {available}"
            )
        weights = saved[self.first] if self.first else settings.model.path.absolute()
        policy: Policy | Policies
        if settings.policies:
            policy = load_policies(settings, weights)
        else:
            policy = Policy.load(base_model(settings, weights), settings.trainer, settings.run.seed)
        if self.first:
            checkpoints.load(checkpoints.read(weights), policy)
        return policy


def _erased(past: LedgerState) -> Counter[int]:
    """Return the number of erased groups by step."""
    groups = [past.groups[name] for name in past.erased if name in past.groups]
    return Counter(group.end["step"] for group in groups if "step" in group.end)


def _versions(past: LedgerState) -> dict[int, int]:
    """Return step → trainer version when its batch was selected, the last time that the step was taken."""
    groups = past.groups.values()
    stepped = [group.end for group in groups if "step" in group.end and not group.discarded]
    return {end["step"]: end["version"] for end in stepped}


def batch_groups(path: Path) -> list[Group]:
    """Return the groups of the batch, in order; the last ones may have been skipped as not finite."""
    members: dict[str, list[Trajectory]] = {}
    for line in read_lines(path):
        if line["state"] == State.STEPPED.value or line.get("untrained"):
            members.setdefault(line["group_id"], []).append(decode_trajectory(line))
    return [Group(name, trajectories[0].task_id, trajectories) for name, trajectories in members.items()]


def _same_weights(policy: Policy | Policies, path: Path) -> bool:
    """Whether the policy's weights equal those in a directory, bit for bit."""
    if isinstance(policy, Policies):
        return all(_same_weights(own, path / name) for name, own in policy.trained.items())
    weights = dict(read_model(path).named_parameters())
    return all(weights[name].equal(tensor.cpu()) for name, tensor in policy.weights().items())


def _equal(before: Any, now: float) -> bool:
    return before == now or (before is None and not math.isfinite(now))
