"""Rollout: keeps as many groups of episodes running as admission allows.

Each slot of a group runs episodes until one succeeds or a failure budget is exhausted. The group is sealed
when every slot is settled. Groups are independent of each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.config import Settings
from tidegate.envs.base import Environment
from tidegate.errors import GatewayError, NoUsableEpisodesError, TidegateError, TrainingError
from tidegate.gateway.client import SessionSummary
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import AttemptDecision
from tidegate.trainer.admission.state import GroupState, Phase, Slot, TaskTicket
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.records.dead_letters import Attempted
from tidegate.trainer.records.trajectories import bounded_answer
from tidegate.trainer.rollout.episodes import EpisodeSource, attempt_seed
from tidegate.trainer.rollout.pause import INFRA_BACKOFF_MAX_S, Pause, backoff_s
from tidegate.trainer.waits import run_to_completion
from tidegate.types import Outcome, Task, Trajectory

MAX_QUARANTINED_IN_A_ROW = 10_000
"""Number of quarantined tasks in a row after which all tasks are assumed to be quarantined."""
RUN_ENDED = "the run ended before a batch had the group"
"""Reason in the status of a client's group that no batch took."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Owns the running groups. `run()` lasts until it is cancelled or raises; `stop()` is final."""

    settings: Settings
    admission: Admission
    episodes: EpisodeSource
    tasks: Environment
    save: Callable[[Sequence[Trajectory], State], Awaitable[None]]
    """Saves episodes that failed, or became stale before their group was leased."""
    dead_letter: Callable[[Task, str, int, Sequence[Attempted]], Awaitable[None]]
    """Called with a task, group, slot and its attempts before the task is quarantined."""
    pause: Pause
    tokens: TokenCounts = field(default_factory=TokenCounts)
    sessions: dict[str, str] = field(default_factory=dict)
    """Session id of every live attempt."""
    finished_episodes: int = 0
    sampled_tokens: int = 0
    last_failure: str = ""
    last_progress: float = field(default_factory=time.monotonic)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _answers: dict[int, Any] = field(default_factory=dict)
    """Gold answers of groups in flight, by the index of their task."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _jitter: random.Random = field(default_factory=lambda: random.Random(0))
    _ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an attempt ends: of slots that fail together, one quarantines the task."""
    _broken: BaseException | None = None
    _skipped: int = 0
    _stopped: bool = False

    async def run(self) -> None:
        """Start groups while admission allows. Raises NoUsableEpisodesError if training cannot progress."""
        try:
            while True:
                # Before the checks below: what changes during them must be seen in another round.
                self._wake.clear()
                self._raise_if_broken()
                while not self._stopped and self.admission.blocked_by() is None:
                    self._start(self.admission.cursor.next())
                await self._wake.wait()
        finally:
            await self.stop()

    def wake(self) -> None:
        """Check again whether a group may start."""
        self._wake.set()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken
        if (why := self.admission.streaks.no_progress_reason()) is not None:
            failure = f"; the last failure: {self.last_failure}" if self.last_failure else ""
            raise NoUsableEpisodesError(f"training stopped: {why}{failure}")

    def _start(self, ticket: TaskTicket) -> None:
        task = self._task(ticket.index)
        group = self.admission.start_group(ticket, task.id, task.kind)
        if group is None:  # quarantined
            self._skipped += 1
            if self._skipped > MAX_QUARANTINED_IN_A_ROW:
                raise NoUsableEpisodesError(
                    f"every task is quarantined; the last reason: {self.last_failure}"
                )
            return
        self._skipped = 0
        self._answers[ticket.index] = bounded_answer(task.answer)
        running = asyncio.create_task(self._group(group, task), name=group.id)
        self._running[group.id] = running
        running.add_done_callback(self._ended)

    def _task(self, index: int) -> Task:
        try:
            return self.tasks.train_task(index)
        except TidegateError:
            raise
        except Exception as error:
            raise TrainingError(
                f"the environment returned no training task {index}: {error!r}; train_task() must accept any "
                "index, see docs/environments.md"
            ) from error

    def answer(self, group: GroupState) -> Any:
        """Return the gold answer of a group's task, as in trajectory files; None if a client formed it.

        Call it once for each group.
        """
        if group.ticket is None:
            return None
        index = group.ticket.index
        if index in self._answers:
            return self._answers.pop(index)
        return bounded_answer(self._task(index).answer)  # the group was started before a resume

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._running.pop(running.get_name(), None)
        if not running.cancelled() and (error := running.exception()) is not None:
            self._broken = error
        self.wake()

    async def _group(self, group: GroupState, task: Task) -> None:
        """Run every slot, and seal the group when it is ready."""
        slots = [asyncio.create_task(self._slot(group, task, n)) for n in range(len(group.slots))]
        try:
            for settled in asyncio.as_completed(slots):
                decision = await settled
                if decision in (AttemptDecision.FAILED, AttemptDecision.LATE):
                    await self._drop(group.id, State.FAILED, group)
                    return
            sessions = [self.sessions.pop(attempt) for attempt in group.successful_attempts()]
            await self._seal(group, task, sessions)
            self.last_progress = time.monotonic()
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)
            for slot_state in group.slots:
                for attempt in (slot_state.running, slot_state.done):
                    if attempt is not None:
                        self.sessions.pop(attempt, None)

    async def _seal(self, group: GroupState, task: Task, sessions: Sequence[str]) -> None:
        """Make a group ready; it ends as failed if a judge is to rank it and gives no verdict."""
        why = await self.episodes.gateway.seal_group(group.id, task.id, sessions, self.episodes.epoch)
        if why is None:
            self.admission.streaks.unranked = 0
            return
        self.last_failure = f"{Outcome.REWARD_ERROR}: {why}"
        self.admission.fail_group(group.id, Outcome.REWARD_ERROR, why)
        await self._drop(group.id, State.FAILED, group)

    async def _slot(self, group: GroupState, task: Task, slot: int) -> AttemptDecision:
        """Attempt a slot until it is settled, and return what follows. A retry has a new session."""
        tried: list[Attempted] = []
        while True:
            await self.pause.wait()
            attempt = self.admission.start_attempt(group.id, slot)
            outcome, why, slow, tokens = await self._attempt(attempt, group, task, slot)
            self.last_progress = time.monotonic()
            tried.append(Attempted(attempt, outcome, why))
            async with self._ending:
                if self.admission.failures.would_quarantine(attempt, outcome, slow=slow):
                    await self.dead_letter(task, group.id, slot, tried)
                probe = attempt == self.admission.outage.probe
                decision = self.admission.end_attempt(attempt, outcome, why, slow=slow, tokens=tokens)
            self.pause.update(probe_failed=probe)
            self.wake()  # a slot may be free, or an outage over
            if decision is not AttemptDecision.RETRY:
                return decision
            self.sessions.pop(attempt, None)
            await asyncio.sleep(self._backoff_s(group.slots[slot], outcome))

    def _backoff_s(self, slot: Slot, outcome: Outcome) -> float:
        if outcome.is_infrastructure_failure:
            return backoff_s(slot.infra_failures, self._jitter, INFRA_BACKOFF_MAX_S)
        return backoff_s(slot.failures, self._jitter)

    async def _attempt(
        self, attempt: str, group: GroupState, task: Task, slot: int
    ) -> tuple[Outcome, str | None, bool, int]:
        """Run an attempt.

        Returns its outcome, the reason of a failure, whether slow engines caused it, and its sampled tokens.
        """
        trainer = self.settings.trainer
        sampling = self.settings.sampling.in_training(trainer.loss.listed_ids, trainer.routing_replay)
        try:
            summary = await self.episodes.run(
                attempt, task, sampling, "train",
                group_id=group.id, slot=slot, seed=attempt_seed(self.settings.run.seed, attempt),
                on_open=lambda session: self.sessions.__setitem__(attempt, session),
            )  # fmt: skip
        except GatewayError as error:
            self.last_failure = f"infra_error: {error}"
            return Outcome.INFRA_ERROR, str(error), False, 0
        self.finished_episodes += 1
        self.sampled_tokens += summary.sampled_tokens
        if not summary.outcome.trainable:
            self.last_failure = f"{summary.outcome}: {summary.error}"
            cancelled = summary.outcome is Outcome.CANCELLED
            self.tokens.record_wasted(
                summary.sampled_tokens, State.CANCELLED if cancelled else State.FAILED, 1
            )
            await self._save_failure(summary, task)
        return summary.outcome, summary.error, summary.engine_wait_s > 0, summary.sampled_tokens

    async def _save_failure(self, summary: SessionSummary, task: Task) -> None:
        """Save a failed episode to a file and delete its session."""
        gateway = self.episodes.gateway
        try:
            trajectory = await gateway.trajectory(summary.session_id)
            trajectory.answer = bounded_answer(task.answer)
            await self.save([trajectory], State.FAILED)
            await gateway.delete_session(summary.session_id)
        except GatewayError as error:
            self.last_failure += f" (its trajectory could not be read: {error})"

    async def _drop(
        self, group_id: str, state: State, group: GroupState | None = None, why: str | None = None
    ) -> None:
        """Drop a group that ended in `state` from the gateway, which aborts its generations.

        Its episodes are saved if `group` is given.
        """
        try:
            dropped = await self.episodes.gateway.drop_group(group_id, self.episodes.epoch, why)
        except GatewayError as error:
            # The gateway drops the group itself when its sessions expire.
            self.last_failure = f"group {group_id} could not be dropped: {error}"
            return
        sampled = sum(trajectory.sampled_tokens() for trajectory in dropped)
        self.tokens.record_wasted(sampled, state, len(dropped))
        if group is not None:
            answer = self.answer(group)
            for trajectory in dropped:
                trajectory.answer = answer
            # The gateway has deleted these episodes: a cancellation would lose them.
            await run_to_completion(self.save(dropped, state))

    async def cancel_stale(self, version: int) -> None:
        """End the groups that will be stale once `version` is published."""
        oldest = {group.id: group.oldest_version for group in await self.episodes.gateway.list_groups()}
        stale = self.admission.will_be_stale(version, oldest)
        await self.end_stale(version, {group_id: oldest[group_id] for group_id in stale})

    async def end_stale(self, version: int, oldest: Mapping[str, int | None]) -> None:
        """End groups that `version` makes stale, given their oldest sampled version, and drop them."""
        groups = {group_id: self.admission.groups[group_id] for group_id in oldest}
        for group_id, sampled in oldest.items():
            running = self._running.get(group_id)
            self.admission.end_stale(group_id, version, sampled)
            if running is not None:
                running.cancel()
        await asyncio.gather(*(self._drop(name, State.STALE, group) for name, group in groups.items()))
        self.wake()

    async def stop(self) -> None:
        """End every running group as `cancelled`, and start no other."""
        self._stopped = True  # before the groups end, as each end lets another start
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        groups = self.admission.groups.items()
        # The ledger has the step of an unpublished group: it has ended already.
        unfinished = [name for name, group in groups if group.phase is not Phase.UNPUBLISHED]
        for group_id in unfinished:
            self.admission.cancel_group(group_id)
        drops = [self._drop(group_id, State.CANCELLED, why=RUN_ENDED) for group_id in unfinished]
        await asyncio.gather(*drops)
