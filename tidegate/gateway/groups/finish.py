"""Ends sessions: finishes and rewards, cancels, expires and deletes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from tidegate.errors import GatewayError
from tidegate.gateway.environments.states import EpisodeStates
from tidegate.gateway.groups.rewards import Scorer
from tidegate.gateway.groups.spans import EpisodeSpans
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.session import (
    FinishReport,
    GatewaySession,
    SessionResult,
    decide_outcome,
    trajectory_of,
)
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Outcome, ToolCall, Trajectory

log = logging.getLogger("tidegate.gateway")


class SessionFinisher:
    """Ends the sessions of one gateway; each session is rewarded in its own task."""

    def __init__(
        self,
        journal: Journal,
        sessions: SessionStore,
        groups: GroupStore,
        scorer: Scorer,
        states: EpisodeStates,
        metrics: GatewayMetrics,
        *,
        grace_s: float,
        retention_s: float,
        spans: EpisodeSpans | None = None,
    ) -> None:
        self._grace_s = grace_s
        self._retention_s = retention_s
        self._journal = journal
        self._sessions = sessions
        self._groups = groups
        self._scorer = scorer
        self._states = states
        self._metrics = metrics
        self._spans = spans

    # -- finished --------------------------------------------------------------------------------

    async def finish(
        self, session: GatewaySession, report: FinishReport, now: float, wait_s: float | None
    ) -> Trajectory | None:
        """Close a session to further calls, reward it and store its trajectory. Idempotent.

        Returns None if the reward takes longer than `wait_s` seconds. Raises GatewayError if the session is
        deleted meanwhile or cannot be written.
        """
        if session.trajectory is not None:
            return session.trajectory
        if session.ending is None:
            # Before `decide_outcome`, which judges by the newest delivered turn.
            session.tree.resolve_deliveries()
            ending = decide_outcome(session, report, now)
            session.close("it was finished")
            session.ending = ending
        # A second caller joins: a reward is computed once, as a judge costs money and may answer
        # differently.
        finishing = session.finishing or self.start_finishing(session)
        # Not `wait_for`, which would cancel the reward when the caller's time is over.
        await asyncio.wait((finishing,), timeout=wait_s)
        if finishing.cancelled():
            raise GatewayError(f"session {session.id} was deleted while it was being finished", status=404)
        return finishing.result() if finishing.done() else None

    def start_finishing(self, session: GatewaySession) -> asyncio.Task[Trajectory]:
        """Start the task that rewards and stores a session whose `ending` is set."""
        assert session.ending is not None, "the ending is decided before"
        task = asyncio.create_task(self._finish(session, session.ending), name=f"finish {session.id}")
        task.add_done_callback(lambda done: self._ended(session, done))
        session.finishing = task
        return task

    async def _finish(self, session: GatewaySession, ending: SessionResult) -> Trajectory:
        # Before the reward: after a crash in between, the reward is computed for the same ending and
        # turns.
        await self._journal.closing(session)
        trajectory = trajectory_of(session, ending)
        await self._score(session, ending, trajectory)
        forget_at = asyncio.get_running_loop().time() + self._retention_s
        # Before the fields are set: what others can see must not be lost by a crash.
        await self._journal.finished(session, trajectory, forget_at)
        session.trajectory, session.forget_at = trajectory, forget_at
        session.ended.set()
        self._metrics.outcomes[trajectory.outcome.value] += 1
        if self._spans is not None:
            self._spans.add(trajectory)
        return trajectory

    async def _score(self, session: GatewaySession, ending: SessionResult, trajectory: Trajectory) -> None:
        """Set the reward; an episode whose state is lost is an `infra_error`, whatever its agent reported."""
        # Episodes without tools would lower the averages of these metrics with zeros.
        if (info := self._states.info(session)) is not None and (info.tools or trajectory.tool_calls):
            trajectory.metrics |= _tool_metrics(trajectory.tool_calls)
        lost = await self._states.wait_until_ready_or_lost(session)
        if lost is not None and trajectory.outcome is not Outcome.CANCELLED:
            trajectory.outcome, trajectory.error = Outcome.INFRA_ERROR, lost
        else:
            # A client's conversation cannot be run again, so its reward waits for an unavailable judge.
            agent_reward, once = ending.agent_reward, session.client is None
            await self._scorer.reward(trajectory, session.task, session.rewards, agent_reward, once=once)

    def _ended(self, session: GatewaySession, task: asyncio.Task[Trajectory]) -> None:
        """Let a failed finish be retried; waiting callers receive its exception."""
        if task.cancelled():
            return
        session.finishing = None  # a task that is done would take a fifth of a kept session's memory
        if (error := task.exception()) is not None:
            log.error("session %s could not be finished: %s", session.id, error)

    # -- cancelled -------------------------------------------------------------------------------

    def cancel_older(self) -> None:
        """Cancel the sessions of older trainers, whose agents ended with them."""
        for session in filter(self._orphaned, self._sessions.all()):
            self.cancel(session)

    def _orphaned(self, session: GatewaySession) -> bool:
        """Whether an older trainer opened the session, and nobody finished it."""
        epoch = session.trainer_epoch
        return epoch is not None and epoch < self._groups.epoch and session.ending is None

    def cancel(self, session: GatewaySession) -> None:
        why = f"the trainer of epoch {session.trainer_epoch}, which ran it, was replaced by a newer one"
        self.end_by_gateway(session, FinishReport(Outcome.CANCELLED, why), asyncio.get_running_loop().time())

    def end_by_gateway(self, session: GatewaySession, report: FinishReport, now: float) -> None:
        """End a session that its agent did not finish; a reply in doubt stays undelivered."""
        # Without `resolve_deliveries`: no client vouches that it read the last reply.
        session.ending = replace(decide_outcome(session, report, now), imposed=True)
        if session.on_stop is not None:
            session.on_stop(session)
        session.close(session.ending.error or "it was ended")
        self.start_finishing(session)

    # -- deleted ---------------------------------------------------------------------------------

    async def forget(self, sessions: list[GatewaySession]) -> None:
        """Delete sessions and their records permanently. Raises GatewayError."""
        for session in sessions:
            # Before the journal's delete: a call that is still running would write a turn after it.
            session.stop("it was deleted")
        await self._journal.forgotten(sessions)
        for session in sessions:
            self._sessions.forget(session)

    async def expire(self, now: float) -> None:
        """Delete sessions past deadline and grace, or past retention; a sealed group never expires."""
        expired = []
        for session in self._sessions.all():
            if not session.finished and now >= session.deadline:
                session.close("its deadline passed")
            # The task would store the trajectory of a deleted session.
            rewarding = session.finishing is not None and not session.finishing.done()
            if now >= self._expires_at(session) and not rewarding and not self._sealed(session):
                log.info("session %s expired (%s)", session.id, session.state)
                expired.append(session)
        try:
            await self.forget(expired)
        except GatewayError as error:
            # They expire again at the next call, so a full disk costs nothing but the delay.
            log.error("%d expired sessions could not be deleted: %s", len(expired), error)

    def _expires_at(self, session: GatewaySession) -> float:
        if session.forget_at is not None:
            return session.forget_at
        return session.deadline + self._grace_s

    def _sealed(self, session: GatewaySession) -> bool:
        return session.group_id is not None and self._groups.get(session.group_id) is not None


def _tool_metrics(calls: Sequence[ToolCall]) -> dict[str, float]:
    """Returns the number of calls, the number of errors among them, and the seconds that they took."""
    return {
        "tool_calls": float(len(calls)),
        "tool_errors": float(sum(call.error for call in calls)),
        "tool_seconds": sum(call.seconds for call in calls),
    }
