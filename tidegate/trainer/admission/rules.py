"""Admission limits, and what follows from the end of an attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from tidegate.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings that admission enforces; named as in `TrainerSettings`."""

    groups_per_batch: int
    group_size: int
    min_group_size: int
    max_staleness: int | None
    publish_interval: int = 1
    publishes: bool = True
    """False: only the first version goes live, so trained groups do not wait for a publish."""
    max_attempts: int = 3
    """Failures of a slot after which it is settled and its task is quarantined."""
    max_infra_attempts: int = 10
    """Infrastructure failures of a slot, outside outages, after which it is settled; no quarantine."""
    max_stale_retries: int = 2
    max_running: int = 1 << 30
    """Limit of concurrent episodes; a larger group runs alone."""
    deadline_s: float = math.inf
    """Deadline of an episode."""
    reply_tokens: int = 0
    """Limit of the tokens of one reply."""
    client_share: float = 1.0
    """Largest share of a batch that the groups of one client may have."""
    steps: int | None = None
    """Steps of the run; None if groups may be filtered, as the groups needed are then unknown."""

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """Return the rules that a run's settings give."""
        trainer = settings.trainer
        return cls(
            groups_per_batch=trainer.groups_per_batch,
            group_size=trainer.group_size,
            min_group_size=trainer.smallest_group,
            max_staleness=trainer.staleness_bound,
            publish_interval=trainer.publish_interval if isinstance(trainer.publish_interval, int) else 1,
            publishes=trainer.publish_interval != "never",
            max_attempts=trainer.max_attempts,
            max_infra_attempts=trainer.max_infra_attempts,
            max_stale_retries=trainer.max_stale_retries,
            max_running=settings.agent.max_concurrency,
            deadline_s=settings.agent.deadline_s,
            reply_tokens=settings.sampling.max_tokens,
            client_share=trainer.max_client_share,
            steps=None if trainer.may_filter else trainer.steps,
        )

    def for_ledger(self) -> dict[str, int | None]:
        """Return the rules for the ledger, which an audit checks its entries against."""
        names = (
            "groups_per_batch", "group_size", "min_group_size", "max_staleness", "max_attempts",
            "max_infra_attempts",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def capacity(self) -> int:
        """Limit of groups in flight; without a bound, that of staleness 4."""
        staleness = 4 if self.max_staleness is None else self.max_staleness
        return (staleness + 1) * self.groups_per_batch * self.publish_interval

    def client_limit(self, size: int) -> int:
        """Return the limit of one client's groups in a batch or minibatch of `size` groups."""
        # A small share of a small minibatch would admit no group at all.
        return max(1, int(self.client_share * size))

    @property
    def client_capacity(self) -> int:
        """Limit of one client's groups that wait for a batch."""
        return self.client_limit(self.groups_per_batch) * self.capacity // self.groups_per_batch


class AttemptDecision(StrEnum):
    """What follows from the end of an attempt."""

    RETRY = "retry"
    """The slot gets another attempt."""
    WAIT = "wait"
    """The slot is settled; other slots of the group still run."""
    READY = "ready"
    """Every slot is settled and the group can be sealed."""
    FAILED = "failed"
    """Too few slots can succeed: the group ended, and its running attempts must be cancelled."""
    LATE = "late"
    """The group had ended already; nothing changes."""
