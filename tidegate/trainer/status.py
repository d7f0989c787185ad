"""The counts of a run that its state line shows, and what the watchdog knows about its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tidegate.trainer.admission.core import Admission
from tidegate.trainer.batch.batcher import Batcher
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.records.recorder import age_metrics
from tidegate.trainer.rollout.evaluator import Evaluator
from tidegate.trainer.rollout.pause import Pause
from tidegate.trainer.rollout.rollout import Rollout
from tidegate.trainer.teacher.teacher import Teacher


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """Reads the state of the run's components; `teacher` is None without distillation."""

    admission: Admission
    rollout: Rollout
    batches: Batcher
    evaluator: Evaluator
    pause: Pause
    tokens: TokenCounts
    teacher: Teacher | None
    _began: float = field(default_factory=time.monotonic)

    def last_progress(self) -> float:
        """Return the time of the last progress: now, during a wait that has a limit of its own."""
        failing = self.teacher is not None and self.teacher.failing
        # Clients come when they like.
        if self.pause.active or failing or (self.batches.clients_form_groups and self.batches.waiting):
            return time.monotonic()
        scored = self._began if self.teacher is None else self.teacher.last_progress
        others = (self.rollout.last_progress, self.batches.last_progress, self.evaluator.last_progress)
        return max(self._began, scored, *others)

    def describe(self, step: int) -> str:
        """Return what a batch of this step waits for."""
        counts = ", ".join(
            f"{number} {state}" for state, number in self.admission.group_counts.items() if number
        )
        phases = [group.phase.value for group in self.admission.groups.values()]
        in_flight = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))) or "none"
        failure = f"; the last failure: {self.rollout.last_failure}" if self.rollout.last_failure else ""
        return (
            f"the trainer waits for {self.admission.rules.groups_per_batch} ready groups at step {step}. "
            f"Groups in flight: {in_flight}. Ledger: {counts or 'empty'}{failure}"
        )

    def snapshot(self) -> dict[str, float]:
        """Return counts of groups, attempts, episodes and tokens."""
        admission, rollout = self.admission, self.rollout
        counts = {f"groups/{state}": float(admission.group_counts[state]) for state in State}
        phases = [group.phase.value for group in admission.groups.values()]
        return {
            **counts,
            "groups/live": float(phases.count("running")),
            "groups/ready": float(phases.count("ready")),
            "groups/leased": float(phases.count("leased")),
            **{
                f"groups/filtered_{how}": float(admission.filtered_alike[how])
                for how in ("solved", "failed", "cut")
            },
            **age_metrics(admission.stale_ages),
            "groups/quarantined_tasks": float(len(admission.failures.quarantined)),
            "attempts/live": float(admission.attempt_counts[State.LIVE]),
            "attempts/failed": float(admission.attempt_counts[State.FAILED]),
            **{f"failures/{cause}": float(number) for cause, number in admission.failures.causes.items()},
            "episodes": float(rollout.finished_episodes + self.batches.accepted_episodes),
            "tokens/sampled_total": float(rollout.sampled_tokens + self.batches.accepted_tokens),
            "version": float(admission.version),
            **self.pause.metrics(),
            **self.tokens.metrics(),
            **({} if self.teacher is None else self.teacher.metrics()),
        }
