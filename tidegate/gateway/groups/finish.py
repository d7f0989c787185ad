"""How sessions end: finished and rewarded, cancelled with their trainer, expired, deleted."""

from __future__ import annotations

import asyncio
import logging

from tidegate.errors import GatewayError
from tidegate.gateway.groups.rewards import Scorer
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.session import (
    FinishReport,
    GatewaySession,
    SessionResult,
    decide,
    trajectory_of,
)
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Outcome, Trajectory

log = logging.getLogger("tidegate.gateway")


class SessionFinisher:
    """Ends the sessions of one gateway; a session that is being rewarded has a task of its own."""

    def __init__(
        self,
        journal: Journal,
        sessions: SessionStore,
        groups: GroupStore,
        scorer: Scorer,
        metrics: GatewayMetrics,
        *,
        grace_s: float,
        retention_s: float,
    ) -> None:
        self._grace_s = grace_s
        self._retention_s = retention_s
        self._journal = journal
        self._sessions = sessions
        self._groups = groups
        self._scorer = scorer
        self._metrics = metrics

    # -- finished --------------------------------------------------------------------------------

    async def finish(
        self, session: GatewaySession, told: FinishReport, now: float, wait_s: float | None
    ) -> Trajectory | None:
        """Refuse further calls, reward it, keep its trajectory. Repeating it changes nothing.

        None: it is still being rewarded after `wait_s`. Raises GatewayError where it is deleted meanwhile,
        or cannot be written.
        """
        if session.trajectory is not None:
            return session.trajectory
        if session.ending is None:
            session.tree.resolve_deliveries()
            ending = decide(session, told, now)
            session.close("it was finished")
            session.ending = ending
        finishing = session.finishing or self.go_on(session)
        await asyncio.wait((finishing,), timeout=wait_s)
        if finishing.cancelled():
            raise GatewayError(f"session {session.id} was deleted meanwhile", status=404)
        return finishing.result() if finishing.done() else None

    def go_on(self, session: GatewaySession) -> asyncio.Task[Trajectory]:
        """Reward and keep a session whose ending is decided."""
        assert session.ending is not None, "how it ends is decided before"
        task = asyncio.create_task(self._finish(session, session.ending), name=f"finish {session.id}")
        task.add_done_callback(lambda done: self._ended(session, done))
        session.finishing = task
        return task

    async def _finish(self, session: GatewaySession, ending: SessionResult) -> Trajectory:
        await self._journal.closing(session)
        trajectory = trajectory_of(session, ending)
        await self._scorer.reward(trajectory, session.task, session.rewards, ending.agent_reward)
        forget_at = asyncio.get_running_loop().time() + self._retention_s
        await self._journal.finished(session, trajectory, forget_at)
        session.trajectory, session.forget_at = trajectory, forget_at
        self._metrics.outcomes[trajectory.outcome.value] += 1
        return trajectory

    def _ended(self, session: GatewaySession, task: asyncio.Task[Trajectory]) -> None:
        """One that could not be written may be tried again: whoever waits for it is told."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session %s could not be finished: %s", session.id, error)
            session.finishing = None

    # -- cancelled -------------------------------------------------------------------------------

    def cancel_older(self) -> None:
        """End what an older trainer opened and will not finish any more: its agents died with it."""
        for session in filter(self.orphaned, self._sessions.all()):
            self.cancel(session)

    def orphaned(self, session: GatewaySession) -> bool:
        return session.epoch is not None and session.epoch < self._groups.epoch and session.ending is None

    def cancel(self, session: GatewaySession) -> None:
        why = f"the trainer of epoch {session.epoch}, which ran it, is over"
        session.close(why)
        # Whether a reply in doubt arrived nobody will ever know: it stays undelivered.
        session.ending = SessionResult(Outcome.CANCELLED, why, asyncio.get_running_loop().time())
        self.go_on(session)

    # -- forgotten -------------------------------------------------------------------------------

    async def forget(self, sessions: list[GatewaySession]) -> None:
        """Delete sessions and what they recorded, for good. Raises GatewayError."""
        for session in sessions:
            session.stop("it was deleted")
        await self._journal.forgotten(sessions)
        for session in sessions:
            self._sessions.forget(session)

    async def expire(self, now: float) -> None:
        """Forget what nobody finishes, and what was kept for long enough; a sealed group never expires."""
        expired = []
        for session in self._sessions.all():
            if session.trajectory is None and now >= session.deadline:
                session.close("its deadline passed")
            rewarding = session.finishing is not None and not session.finishing.done()
            if now >= self._kept_until(session) and not rewarding and not self._sealed(session):
                log.info("session %s expired (%s)", session.id, session.state)
                expired.append(session)
        try:
            await self.forget(expired)
        except GatewayError as error:
            log.error("%d expired sessions are kept: %s", len(expired), error)

    def _kept_until(self, session: GatewaySession) -> float:
        if session.forget_at is not None:
            return session.forget_at
        return session.deadline + self._grace_s

    def _sealed(self, session: GatewaySession) -> bool:
        return session.group_id is not None and self._groups.get(session.group_id) is not None
