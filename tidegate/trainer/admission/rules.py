"""The rules of admission, and its verdict on an attempt that ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that admission obeys; the names are those of `TrainerSettings`."""

    groups_per_batch: int
    group_size: int
    min_group_size: int
    max_staleness: int | None
    publish_interval: int = 1
    publishes: bool = True
    """False: no version but the first ever goes live, so nothing that was stepped on waits for one."""
    max_attempts: int = 3
    """Failures of a slot's own before it is given up and its task is quarantined."""
    max_infra_attempts: int = 10
    """`infra_error` endings of a slot, outside of outages, before it is given up; its task is not blamed."""
    max_stale_retries: int = 2
    max_running: int = 1 << 30
    """Episodes that run at the same time; a group larger than that runs alone."""
    steps: int | None = None
    """Optimiser steps of the run; None where groups are filtered, as nobody knows then how many it takes."""

    def proved(self) -> dict[str, int | None]:
        """Those that an audit holds the book against."""
        names = (
            "groups_per_batch", "group_size", "min_group_size", "max_staleness", "max_attempts",
            "max_infra_attempts",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding; without a bound, as many as staleness 4 would allow."""
        ahead = 4 if self.max_staleness is None else self.max_staleness
        return (ahead + 1) * self.groups_per_batch * self.publish_interval


class AttemptVerdict(StrEnum):
    """What the end of an attempt means."""

    RETRY = "retry"
    """The slot gets another attempt."""
    WAIT = "wait"
    """The slot is settled; other slots of the group still run."""
    READY = "ready"
    """Every slot is settled and the group can be sealed."""
    FAILED = "failed"
    """Too few slots can succeed: the group ended, its running attempts are to be cancelled."""
    LATE = "late"
    """The group has ended already; nothing changes."""
