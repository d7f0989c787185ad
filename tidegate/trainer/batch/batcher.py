"""Batch assembly: leases ready groups, filters those without a gradient, and drops stale ones.

A batch has exactly `groups_per_batch` groups, none staler than the bound when the batch is assembled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from tidegate.errors import TrainingError
from tidegate.gateway.client import GatewayClient
from tidegate.loading import load_object
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.state import GroupState, Phase
from tidegate.trainer.batch.credit import Advantage, faulty_reward
from tidegate.trainer.batch.rows import TrainingSequence, is_trained, rows_of
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.waits import wait_at_most
from tidegate.types import Group

LEASE_WAIT_S = 5.0
FILTER_EVERY_S = 0.25
FILTER_S = 60.0
"""Time limit of one call of a filter of the user's own."""
UNKNOWN = "unknown"
"""State in the acknowledgement of a group that is not in admission: never issued, or ended."""
REFUSED = "refused"
"""State in the acknowledgement of a client's group that admission refused."""


@dataclass(slots=True)
class Batch:
    """A batch or minibatch, and the groups that were dropped while it was assembled."""

    version: int
    """Version of the trainer when it was selected."""
    staleness: list[int]
    """Versions between that one and the oldest token of each group."""
    groups: list[Group]
    dropped: list[tuple[Group, State]]
    waited_s: float
    """Seconds that the trainer waited for it (`time/wait_for_batch`)."""
    queued_s: float
    """Mean seconds that its groups waited for the trainer (`time/batch_queue`)."""
    advantages: list[list[Advantage]] = field(default_factory=list)
    _: KW_ONLY
    untrained: list[str] = field(default_factory=list)
    """The dropped groups that were in the batch, but in no optimiser step that was taken."""
    scored_s: float = 0.0
    """Seconds that the trainer waited for the teacher (`time/teacher`)."""

    def rows(self) -> list[TrainingSequence]:
        """Return the token sequences to train on."""
        return rows_to_train(self.groups, self.advantages)

    @classmethod
    def of(cls, parts: Sequence[Batch]) -> Batch:
        """Join minibatches into one batch."""
        groups = [group for part in parts for group in part.groups]
        return cls(
            parts[0].version,
            [age for part in parts for age in part.staleness],
            groups,
            [dropped for part in parts for dropped in part.dropped],
            sum(part.waited_s for part in parts),
            sum(part.queued_s * len(part.groups) for part in parts) / len(groups),
            [values for part in parts for values in part.advantages],
            scored_s=sum(part.scored_s for part in parts),
        )

    def without(self, untrained: Sequence[str]) -> Batch:
        """Return the batch without the groups on which no optimiser step was taken, which end `filtered`."""
        kept = [at for at, group in enumerate(self.groups) if group.id not in untrained]
        return replace(
            self,
            staleness=[self.staleness[at] for at in kept],
            groups=[self.groups[at] for at in kept],
            dropped=self.dropped
            + [(group, State.FILTERED) for group in self.groups if group.id in untrained],
            advantages=[self.advantages[at] for at in kept],
            untrained=list(untrained),
        )


def rows_to_train(
    groups: Sequence[Group], advantages: Sequence[Sequence[Advantage]]
) -> list[TrainingSequence]:
    """Return the token sequences of groups with their trajectories' advantages, in order."""
    return [
        row
        for group, values in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, values, strict=True)
        if advantage is not None
        for row in rows_of(trajectory, advantage)
    ]


class GroupScorer(Protocol):
    """Scores groups with a teacher, from the time when they are leased."""

    def begin(self, group: Group) -> None: ...
    def drop(self, group_id: str) -> None: ...
    async def finish(self, groups: Collection[str]) -> float:
        """Wait until the groups are scored; returns the seconds waited."""


class GroupFilter:
    """A filter of the user's own (`trainer.filter`); a group for which it returns False ends `filtered`.

    Args:
        use: `file.py:function` or `module:function`.

    Raises:
        ConfigError: There is no such function, or its module cannot be imported.
    """

    def __init__(self, use: str) -> None:
        self.use = use
        self._keeps: Callable[[Group], object] = load_object(use, {}, "filter")

    async def keeps(self, group: Group) -> bool:
        """Return whether to train on the group.

        Raises:
            TrainingError: The function raised, took too long, or returned neither True nor False.
        """
        try:
            # In a thread, so that a slow function does not stop the event loop.
            verdict = await asyncio.wait_for(asyncio.to_thread(self._keeps, group), FILTER_S)
        except Exception as error:
            raise TrainingError(
                f"trainer.filter = {self.use!r} failed on group {group.id} of task {group.task_id!r} "
                f"({type(error).__name__}: {error}): repair the function, or remove the setting"
            ) from error
        if not isinstance(verdict, bool):
            raise TrainingError(
                f"trainer.filter = {self.use!r} returned {verdict!r:.80} for group {group.id}: it must "
                "return True to train on the group, or False"
            )
        return verdict


def _filtered_because(group: Group) -> str:
    if any(is_trained(turn) for trajectory in group.trajectories for turn in trajectory.turns):
        return "its rewards are all equal (trainer.dynamic_sampling), or its episodes were cut and are masked"
    return "none of its tokens is to be trained on"


async def _unrecorded(group: Group, refusal: str | None) -> None: ...


async def _unsaved(group: Group, state: State) -> None: ...


@dataclass(slots=True, kw_only=True)
class Batcher:
    """Leases groups from the gateway and assembles batches.

    A group for which `should_train` is false ends `filtered`, and another takes its place.
    """

    gateway: GatewayClient
    admission: Admission
    on_freed: Callable[[], None]
    """Called when admission has room for another group."""
    should_train: Callable[[Group], bool]
    tokens: TokenCounts = field(default_factory=TokenCounts)
    answer: Callable[[GroupState], Any] = lambda _: None
    """Group → the gold answer of its task, as in trajectory files."""
    offered: Callable[[Group, str | None], Awaitable[None]] = _unrecorded
    """Called with a client's group when admission has accepted it, or refused it for a reason."""
    save: Callable[[Group, State], Awaitable[None]] = _unsaved
    """Saves the episodes of a group that was dropped, when the ledger has its end."""
    scorer: GroupScorer | None = None
    own_filter: GroupFilter | None = None
    last_progress: float = field(default_factory=time.monotonic)
    clients_form_groups: bool = False
    accepted_episodes: int = 0
    """Episodes of clients' groups that admission accepted."""
    accepted_tokens: int = 0
    """Tokens sampled in these episodes."""
    waiting: bool = False
    """Whether a lease call waits at the gateway."""
    _groups: dict[str, Group] = field(default_factory=dict)
    _leased_at: dict[str, float] = field(default_factory=dict)
    _dropped: list[tuple[Group, State]] = field(default_factory=list)
    """Groups that were dropped since the last batch, also while a wait for one was interrupted."""

    def add(self, group: Group) -> None:
        """Add a group that is leased in admission. A restored group has no lease at the gateway."""
        self._groups[group.id] = group
        self._leased_at[group.id] = time.monotonic()
        if self.scorer is not None:
            self.scorer.begin(group)

    async def next_batch(
        self, number: int | None = None, interrupted: Callable[[], bool] = lambda: False
    ) -> Batch | None:
        """Wait for a batch, or a minibatch of `number` groups; None if `interrupted` became true first.

        The wait is bounded: every attempt has a deadline, rollout raises when too many groups in a row failed
        or were filtered, and the watchdog raises when nothing progresses.
        """
        started = time.monotonic()
        while True:
            # Until none is left: a version may go live while a group is saved and acknowledged.
            while stale := self.admission.end_stale_groups():
                for group_id in stale:
                    self._dropped.append(await self._drop(group_id, State.STALE))
            selected = self.admission.select_batch(number)
            if selected is not None:
                break
            if interrupted():
                return None
            await self._lease_and_filter(LEASE_WAIT_S)
        now = time.monotonic()
        version = self.admission.version
        staleness = [self.admission.groups[group_id].staleness for group_id in selected]
        groups = [self._groups[group_id] for group_id in selected]
        ready = sum(now - self._leased_at.pop(group_id) for group_id in selected) / len(groups)
        scored_s = 0.0 if self.scorer is None else await self.scorer.finish(selected)
        dropped, self._dropped = self._dropped, []
        return Batch(version, staleness, groups, dropped, now - started, ready, scored_s=scored_s)

    @contextlib.asynccontextmanager
    async def filtering(self) -> AsyncIterator[None]:
        """Lease and filter groups in the `async with` block, a step that takes long.

        Ready groups count as in flight until they are filtered: late in a run, when most of them are all
        solved, none would start during the step, and the next batch would wait for others. Groups of clients
        are left at the gateway: a run that ends tells their clients while they wait there.
        """
        if self.clients_form_groups:
            yield
            return
        ended = asyncio.Event()
        work = asyncio.create_task(self._filter_until(ended))
        try:
            yield
        finally:
            ended.set()
            await work

    async def _filter_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await wait_at_most(ended, FILTER_EVERY_S)
            if not ended.is_set():
                await self._lease_and_filter(0.0)

    async def _lease_and_filter(self, wait_s: float) -> None:
        """Lease groups, waiting so long for the first one, and drop those without a gradient."""
        admission = self.admission
        self.waiting = wait_s > 0
        try:
            leased = await self.gateway.lease(admission.epoch, admission.rules.groups_per_batch, wait_s)
        finally:
            self.waiting = False
        for group in leased:
            if filtered := await self._take(group):
                self._dropped.append(filtered)

    async def _take(self, group: Group) -> tuple[Group, State] | None:
        """Add a leased group or filter it. A client's group is accepted first, or refused.

        Any other group that is not in admission is only acknowledged.
        """
        self.last_progress = time.monotonic()
        if not await self._admit(group):
            return None
        # First: `should_train` raises for rewards that are not finite.
        faulty = faulty_reward(group)
        trainable = faulty is None and self.should_train(group)
        if not trainable or (self.own_filter is not None and not await self.own_filter.keeps(group)):
            if group.id not in self.admission.groups:  # its client withdrew it during the call of the filter
                return None
            self._groups[group.id] = group
            why = self.own_filter.use if trainable and self.own_filter is not None else faulty
            self.admission.filter_group(group.id, cut=all(one.cut() for one in group.trajectories), why=why)
            return await self._drop(group.id, State.FILTERED, why=why or _filtered_because(group))
        self.add(group)
        return None

    async def _admit(self, group: Group) -> bool:
        """Mark a group as leased in admission. Returns False if it is not to be trained on."""
        admission = self.admission
        known = admission.groups.get(group.id)
        if known is None and group.client is not None:
            refusal = admission.accept(group)
            if refusal is not None:
                await self.offered(group, refusal)
                await self.gateway.ack(admission.epoch, group.lease_id, REFUSED, refusal)
                return False
            self.accepted_episodes += len(group.trajectories)
            self.accepted_tokens += sum(trajectory.sampled_tokens() for trajectory in group.trajectories)
        elif known is None:  # never issued, or ended during the lease call
            await self.gateway.ack(admission.epoch, group.lease_id, UNKNOWN)
            return False
        else:
            answer = self.answer(known)
            for trajectory in group.trajectories:
                trajectory.answer = answer
            admission.lease(group.id, group.oldest_version(), group.newest_version(), group.solved())
        if group.client is None:
            return True
        self._groups[group.id] = group  # from now on it may be withdrawn
        # Also of a group that is known: a trainer that was killed between the ledger's entry and this line.
        await self.offered(group, None)
        return group.id in self._groups

    async def _drop(
        self, group_id: str, state: State, *, save: bool = True, why: str | None = None
    ) -> tuple[Group, State]:
        self.on_freed()
        group = self._groups.pop(group_id)
        self._leased_at.pop(group_id, None)
        if self.scorer is not None:
            self.scorer.drop(group_id)
        sampled = sum(trajectory.sampled_tokens() for trajectory in group.trajectories)
        self.tokens.record_wasted(sampled, state, len(group.trajectories))
        if save:
            # Before the acknowledgement, after which the gateway need not keep the group.
            await self.save(group, state)
        await self._ack(group, state, why)
        return group, state

    async def withdraw(self, groups: Collection[str]) -> None:
        """End those of these groups that wait for a batch as `filtered`; their client erased them."""
        for group_id in groups:
            state = self.admission.groups.get(group_id)
            if state is not None and state.phase is Phase.LEASED:
                self.admission.filter_group(group_id)
                await self._drop(group_id, State.FILTERED, save=False)

    async def _ack(self, group: Group, state: State, why: str | None = None) -> None:
        if group.lease_id:
            await self.gateway.ack(self.admission.epoch, group.lease_id, state, why)

    def record_step(self, batch: Batch, step: int) -> None:
        """Record the step in the ledger."""
        # First: if the ledger cannot be written this raises, and nothing else has changed.
        self.admission.step([group.id for group in batch.groups], step, len(batch.untrained))
        for group in batch.groups:
            self.tokens.record_used(group.trajectories)
            del self._groups[group.id]

    async def end_trained(self, batch: Batch, step: int) -> None:
        """Acknowledge a recorded step's groups to the gateway, and end those without an optimiser step."""
        for group in batch.groups:
            await self._ack(group, State.STEPPED, f"step {step}")
        await self.end_untrained(batch, saved=True)

    async def end_untrained(self, batch: Batch, *, saved: bool = False) -> None:
        """End the groups on which no optimiser step was taken as `filtered`.

        Args:
            batch: The batch.
            saved: Whether a step's file has them.
        """
        for group_id in batch.untrained:
            self.admission.filter_group(group_id)
            why = "the loss or gradient of its step was not finite"
            await self._drop(group_id, State.FILTERED, save=not saved, why=why)
        if not saved:  # no step has counted them
            self._dropped += batch.dropped
