"""Gives offered sessions to workers, and ends those of workers that are lost."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import GatewayError
from tidegate.gateway.environments.states import EpisodeStates
from tidegate.gateway.groups.finish import SessionFinisher
from tidegate.gateway.ids import api_key_of, new_finish_key
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.sessions.session import FinishReport, GatewaySession
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Outcome

LOST_AFTER = 3
"""Heartbeat intervals without a heartbeat after which a worker's attempt is lost."""
LATE_S = 3.0
"""Seconds after its deadline in which a worker may still report an attempt, before it ends as `timeout`."""
BETWEEN_POLLS_S = 5.0
"""Seconds after a poll or heartbeat in which a worker without attempts counts as connected."""
TOGETHER_S = 0.1
"""Polls that end within so many seconds end together: the event loop wakes once for all of them."""
LISTED_S = 600.0
"""Seconds for which a worker that sends nothing stays listed."""


@dataclass(eq=False, slots=True)
class Poll:
    """A worker's wait for attempts."""

    worker: str
    capacity: int
    woken: asyncio.Future[None]
    """Done once there may be a session for the poll, or its time is over."""

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


@dataclass(slots=True)
class _Queue:
    """Queued sessions, and the polls that wait for them; both in the order in which they came."""

    sessions: deque[GatewaySession] = field(default_factory=deque)
    polls: list[Poll] = field(default_factory=list)

    def wake(self) -> None:
        """Wake the first poll if there are sessions. Each poll wakes the next one when it ends."""
        if self.sessions and self.polls:
            self.polls[0].wake()

    def pop(self, poll: Poll) -> list[GatewaySession]:
        """Remove a poll's sessions: of more than one waiting poll, each gets a share."""
        if poll is not self.polls[0]:
            return []
        share = min(poll.capacity, -(-len(self.sessions) // len(self.polls)))
        taken: list[GatewaySession] = []
        while self.sessions and len(taken) < share:
            session = self.sessions.popleft()
            # Sessions that end while they are queued stay until `expire` removes them.
            if session.closed is None:
                taken.append(session)
        return taken


class AttemptQueue:
    """Offered sessions of one gateway, in the order in which they were opened.

    An attempt is given to one worker. Polls that wait are served in the order in which they came. The
    trainer's own agents have a queue of their own: they get no other attempts, and no one else gets theirs.
    """

    def __init__(
        self,
        journal: Journal,
        sessions: SessionStore,
        finisher: SessionFinisher,
        states: EpisodeStates,
        id_prefix: str = "",
    ) -> None:
        self._states = states
        self._id_prefix = id_prefix
        self._journal = journal
        self._sessions = sessions
        self._finisher = finisher
        self._queues = {False: _Queue(), True: _Queue()}
        """Those of workers and of the trainer's own agents."""
        self._claims: dict[str, str] = {}
        """Secret of each worker, by its name; a call in that name must have it."""
        self._seen: dict[str, float] = {}
        """Time of the last call by worker."""
        self._left: set[str] = set()
        """Workers that ended; a poll by one of them may still be waiting."""
        self._stopped: dict[str, list[str]] = {}
        """Attempts of each worker that the gateway ended and has not yet reported to it."""
        self._finished: Counter[str] = Counter()
        """Number of agents that returned, by worker."""

    @property
    def queued(self) -> int:
        return sum(session.closed is None for queue in self._queues.values() for session in queue.sessions)

    def add(self, session: GatewaySession) -> None:
        """Queue an offered session."""
        queue = self._queue_of(session)
        queue.sessions.append(session)
        queue.wake()

    def restore(self, session: GatewaySession) -> None:
        """Queue an offered session after a restart, or wait for the worker that took it."""
        if session.offer_heartbeat_s is None or session.ending is not None:
            return
        if session.worker is None:
            session.restart_reason = None  # its agent did not start
            self.add(session)
        else:
            # The time without a gateway is no silence of the worker.
            session.worker_seen, session.on_stop = _now(), self._stop

    def claim(self, worker: str, secret: str, *, own: bool) -> None:
        """Checks that calls in a worker's name have the secret of its first call; those of the trainer's own
        agents have its key instead. Raises GatewayError (403)."""
        claim = "own" if own else f"worker {secret}"
        if not hmac.compare_digest(self._claims.setdefault(worker, claim).encode(), claim.encode()):
            raise GatewayError(
                f"worker {worker!r} is another process, whose secret this call does not have: choose "
                "a unique name, and send the same secret with each call",
                status=403,
            )

    async def take(
        self, worker: str, capacity: int, wait_s: float, *, own: bool = False
    ) -> list[tuple[GatewaySession, str]]:
        """Give queued sessions to a worker, and return them with their finish keys; their deadlines start.

        Args:
            worker: Name of the worker.
            capacity: Limit of the number of sessions.
            wait_s: Seconds to wait for the first session, or for an ended attempt of the worker. The wait is
                prolonged a little, so that many polls end together.
            own: Whether it runs the trainer's own agents.

        Raises:
            GatewayError: The journal cannot be written; the sessions stay queued.
        """
        loop = asyncio.get_running_loop()
        queue, poll = self._queues[own], Poll(worker, capacity, loop.create_future())
        end = math.ceil((loop.time() + wait_s) / TOGETHER_S) * TOGETHER_S
        timer = loop.call_at(end, poll.wake)
        if worker in self._left or worker in self._stopped or wait_s == 0:
            poll.wake()
        queue.polls.append(poll)
        queue.wake()
        taken: list[GatewaySession] = []
        try:
            await poll.woken
            if worker not in self._left:
                taken = queue.pop(poll)
        finally:
            timer.cancel()
            queue.polls.remove(poll)
            queue.wake()
            self._seen[worker] = _now()
        return await self._give([(session, self._start(session, worker)) for session in taken])

    async def _give(self, taken: Sequence[tuple[GatewaySession, str]]) -> list[tuple[GatewaySession, str]]:
        """Record that a worker gets sessions; return those that have not ended meanwhile.

        Raises:
            GatewayError: The journal cannot be written; the sessions are queued again.
        """
        if not taken:
            return []
        sessions = [session for session, _ in taken]
        try:
            await self._journal.offered(sessions)
        except BaseException:
            self._requeue(sessions)
            raise
        given = [(session, key) for session, key in taken if session.closed is None]
        for session, _ in given:
            self._states.start(session)
        return given

    async def give_back(self, taken: Iterable[tuple[GatewaySession, str]]) -> None:
        """Queue sessions again, before all others, whose worker did not get them."""
        sessions = [session for session, _ in taken]
        for session in sessions:
            self._states.release(session)
        self._requeue(sessions)
        await self._journal.offered(sessions)

    def stopped(self, worker: str) -> list[str]:
        """Return, once, the attempts of a worker that the gateway ended: their agents can stop."""
        return self._stopped.pop(worker, [])

    def count(self, session: GatewaySession) -> None:
        """Record that the agent of an attempt returned."""
        if session.worker is not None:
            self._finished[session.worker] += 1

    def leave(self, worker: str) -> dict[str, int]:
        """End the attempts of a worker that ends, and give it no more.

        Returns their number, and how many of its agents returned.
        """
        self._left.add(worker)
        self._wake(worker)
        self._seen[worker] = now = _now()
        attempts = [session for session in self._running() if session.worker == worker]
        for session in attempts:
            self._finisher.end_by_gateway(
                session, FinishReport(Outcome.CANCELLED, f"worker {worker} ended"), now
            )
        return {"ended": len(attempts), "returned": self._finished[worker]}

    def heartbeat(self, attempt: str, worker: str) -> None:
        """Record a worker's heartbeat. Raises GatewayError (410) if it does not run this attempt."""
        session = self._sessions.get(attempt)
        if session is None:
            raise GatewayError("the attempt was ended and deleted", status=410)
        if session.closed is not None:
            raise GatewayError(f"the attempt has ended: {session.closed}", status=410)
        if session.worker != worker:
            raise GatewayError(f"the attempt is not run by worker {worker}", status=410)
        session.worker_seen = self._seen[worker] = _now()

    def expire(self, now: float) -> None:
        """End the sessions whose worker is lost or whose deadline passed; remove lost workers."""
        for queue in self._queues.values():
            queue.sessions = deque(session for session in queue.sessions if session.closed is None)
        for session in self._running():
            silent, heartbeat_s = now - session.worker_seen, session.offer_heartbeat_s
            # After the deadline the agent was too slow, whether or not its worker is lost.
            if heartbeat_s and silent >= LOST_AFTER * heartbeat_s and now < session.deadline:
                why = f"worker {session.worker} sent no heartbeat for {silent:.0f} s"
                self._finisher.end_by_gateway(session, FinishReport(Outcome.INFRA_ERROR, why), now)
            elif now >= session.deadline + LATE_S:
                why = "the agent did not return before its deadline"
                self._finisher.end_by_gateway(session, FinishReport(Outcome.TIMEOUT, why), now)
        self._seen = {worker: seen for worker, seen in self._seen.items() if now - seen < LISTED_S}
        self._left &= self._seen.keys()
        for known in (self._stopped, self._finished, self._claims):
            for worker in known.keys() - self._seen.keys():
                del known[worker]

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the last minutes with their numbers of running attempts."""
        now, running = _now(), Counter(session.worker or "" for session in self._running())
        polling = {poll.worker for queue in self._queues.values() for poll in queue.polls}
        return [
            {
                "worker": name,
                "running": running[name],
                "connected": name in polling
                or running[name] > 0
                or now - self._seen.get(name, -math.inf) < BETWEEN_POLLS_S,
                "polling": name in polling,
                "seen_s": round(now - self._seen.get(name, now), 1),
            }
            for name in sorted({*self._seen, *running, *polling})
        ]

    def _running(self) -> list[GatewaySession]:
        return [
            session
            for session in self._sessions.all()
            if session.worker is not None and session.ending is None
        ]

    def _queue_of(self, session: GatewaySession) -> _Queue:
        return self._queues[session.offer_heartbeat_s == 0]

    def _start(self, session: GatewaySession, worker: str) -> str:
        """Give a session to a worker and return the key that finishes it; the key that opened it is void."""
        assert session.deadline_s is not None, "it is set when the session is opened"
        now, key = _now(), new_finish_key()
        session.worker, session.worker_seen, session.on_stop = worker, now, self._stop
        # The wait for a worker takes nothing from the agent's time.
        session.opened, session.deadline = now, now + session.deadline_s
        self._sessions.set_key(session, api_key_of(key, self._id_prefix))
        return key

    def _stop(self, session: GatewaySession) -> None:
        """Report to the worker, in the next response to its poll, that an attempt ended."""
        if session.worker is not None and session.worker not in self._left:
            self._stopped.setdefault(session.worker, []).append(session.id)
            self._wake(session.worker)

    def _wake(self, worker: str) -> None:
        for queue in self._queues.values():
            for poll in queue.polls:
                if poll.worker == worker:
                    poll.wake()

    def _requeue(self, sessions: Sequence[GatewaySession]) -> None:
        for session in reversed(sessions):
            session.worker, session.on_stop, session.deadline = None, None, math.inf
            queue = self._queue_of(session)
            queue.sessions.appendleft(session)
            queue.wake()


def _now() -> float:
    return asyncio.get_running_loop().time()
