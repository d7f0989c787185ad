"""Batches: lease ready groups, filter what teaches nothing (dynamic sampling), sweep by staleness, cut.

The cut is exact: `groups_per_batch` groups, none staler than the bound at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.client import GatewayClient
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.state import BatchSelection
from tidegate.trainer.batch.credit import Advantage
from tidegate.trainer.batch.rows import TrainSequence, rows_of
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.types import Group

LEASE_WAIT_S = 5.0
UNKNOWN = "unknown"
"""How the gateway is told of a group that is not in the ledger, or not any more."""


@dataclass(slots=True)
class Batch:
    """A cut batch, or a minibatch of it, and the groups that were dropped while it was gathered."""

    cut: BatchSelection
    groups: list[Group]
    dropped: list[tuple[Group, State]]
    waited_s: float
    """How long the trainer waited for it (`time/wait_for_batch`)."""
    ready_s: float
    """How long its groups waited for the trainer, on average (`time/wait_for_policy`)."""

    advantages: list[list[Advantage]] = field(default_factory=list)

    def rows(self) -> list[TrainSequence]:
        """The token sequences to train on."""
        return rows_to_train(self.groups, self.advantages)

    @classmethod
    def of(cls, parts: Sequence[Batch]) -> Batch:
        """Minibatches, in order, as one batch."""
        groups = [group for part in parts for group in part.groups]
        return cls(
            BatchSelection.of([part.cut for part in parts]),
            groups,
            [one for part in parts for one in part.dropped],
            sum(part.waited_s for part in parts),
            sum(part.ready_s * len(part.groups) for part in parts) / len(groups),
            [values for part in parts for values in part.advantages],
        )


def rows_to_train(groups: Sequence[Group], advantages: Sequence[Sequence[Advantage]]) -> list[TrainSequence]:
    """The token sequences of groups at their trajectories' advantages, in order."""
    return [
        row
        for group, values in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, values, strict=True)
        if advantage is not None
        for row in rows_of(trajectory, advantage)
    ]


@dataclass(slots=True)
class Batcher:
    """Gathers groups from the gateway. `freed` is told whenever something left admission's count.

    A group that `keeps` refuses ends `filtered`, and another takes its place.
    """

    gateway: GatewayClient
    admission: Admission
    freed: Callable[[], None]
    keeps: Callable[[Group], bool]
    tokens: TokenCounts = field(default_factory=TokenCounts)
    answer: Callable[[int], Any] = lambda _: None
    """Gold answer of the training task at an index, as trajectory files hold it."""
    last_progress: float = field(default_factory=time.monotonic)
    _held: dict[str, Group] = field(default_factory=dict)
    _leased_at: dict[str, float] = field(default_factory=dict)

    def hold(self, group: Group) -> None:
        """Take a group that admission knows as leased. One that a resume put back has no lease."""
        self._held[group.id] = group
        self._leased_at[group.id] = time.monotonic()

    async def next(self, number: int | None = None) -> Batch:
        """Wait for `number` groups, or a batch of them, and cut.

        What bounds the wait: every attempt has a deadline, admission says when too many groups in a row
        failed or were filtered, and the watchdog when nothing moves."""
        started = time.monotonic()
        dropped: list[tuple[Group, State]] = []
        while True:
            for group_id in self.admission.sweep():
                dropped.append(await self._drop(group_id, State.STALE))
            cut = self.admission.cut(number)
            if cut is not None:
                break
            for group in await self.gateway.lease(
                self.admission.epoch, self.admission.rules.groups_per_batch, LEASE_WAIT_S
            ):
                if filtered := await self._take(group):
                    dropped.append(filtered)
        now = time.monotonic()
        groups = [self._held[group_id] for group_id in cut.groups]
        ready = sum(now - self._leased_at.pop(group_id) for group_id in cut.groups) / len(groups)
        return Batch(cut, groups, dropped, now - started, ready)

    async def _take(self, group: Group) -> tuple[Group, State] | None:
        """Hold a leased group, or filter it at once. One that admission does not know counts nowhere."""
        self.last_progress = time.monotonic()
        if group.id not in self.admission.groups:  # never issued, or ended while its lease was answered
            await self.gateway.ack(self.admission.epoch, group.lease_id, UNKNOWN)
            return None
        answer = self.answer(self.admission.groups[group.id].ticket.index)
        for trajectory in group.trajectories:
            trajectory.answer = answer
        self.hold(group)
        self.admission.lease(group.id, group.oldest_version(), group.newest_version())
        if not self.keeps(group):
            self.admission.filter_group(group.id)
            return await self._drop(group.id, State.FILTERED)
        return None

    async def _drop(self, group_id: str, state: State) -> tuple[Group, State]:
        self.freed()
        group = self._held.pop(group_id)
        self._leased_at.pop(group_id, None)
        sampled = sum(one.sampled_tokens() for one in group.trajectories)
        self.tokens.waste(sampled, state, len(group.trajectories))
        await self._ack(group, state)
        return group, state

    async def _ack(self, group: Group, state: State, step: int | None = None) -> None:
        if group.lease_id:
            await self.gateway.ack(self.admission.epoch, group.lease_id, state)

    async def stepped(self, batch: Batch, step: int) -> None:
        """Enter the step in the ledger, then let the gateway forget the groups."""
        self.admission.step(batch.cut, step)
        for group in batch.groups:
            self.tokens.train(group.trajectories)
            del self._held[group.id]
        for group in batch.groups:
            await self._ack(group, State.STEPPED, step)

    async def skip(self, batch: Batch) -> None:
        """The step on this batch was skipped: its groups end `filtered`."""
        for group_id in batch.cut.groups:
            self.admission.filter_group(group_id)
            await self._drop(group_id, State.FILTERED)
