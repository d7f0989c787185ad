"""Gives offered sessions to remote workers, and ends those of workers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from tidegate.errors import GatewayError
from tidegate.gateway.environments.states import EpisodeStates
from tidegate.gateway.groups.finish import SessionFinisher
from tidegate.gateway.ids import new_key
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.sessions.session import FinishReport, GatewaySession
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Outcome

LOST_AFTER = 3
"""Heartbeat intervals without a heartbeat after which a worker's attempt is lost."""
BETWEEN_POLLS_S = 5.0
"""Seconds after a poll or heartbeat in which a worker without attempts counts as connected."""
LISTED_S = 600.0
"""Seconds for which a worker that sends nothing stays listed."""


class AttemptQueue:
    """Offered sessions of one gateway, in the order in which they were opened.

    An attempt is given to one worker. Polls that wait are served in the order in which they came.
    """

    def __init__(
        self, journal: Journal, sessions: SessionStore, finisher: SessionFinisher, states: EpisodeStates
    ) -> None:
        self._states = states
        self._journal = journal
        self._sessions = sessions
        self._finisher = finisher
        self._queue: deque[GatewaySession] = deque()
        self._filled = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held by the poll that is served next; others wait for it in order."""
        self._polls: Counter[str] = Counter()
        """Polls in progress by worker."""
        self._seen: dict[str, float] = {}
        """Time of the last call by worker."""
        self._left: set[str] = set()
        """Workers that ended; a poll of theirs may still be waiting."""

    @property
    def queued(self) -> int:
        return sum(session.closed is None for session in self._queue)

    def add(self, session: GatewaySession) -> None:
        """Queue an offered session."""
        self._queue.append(session)
        self._filled.set()

    def restore(self, session: GatewaySession) -> None:
        """Queue an offered session after a restart, or wait for the heartbeats of the worker that took it."""
        if session.offer_heartbeat_s is None or session.ending is not None:
            return
        if session.worker is None:
            session.restart_reason = None  # its agent did not start
            self.add(session)
        else:
            session.worker_seen = _now()

    async def take(self, worker: str, capacity: int, wait_s: float) -> list[tuple[GatewaySession, str]]:
        """Give queued sessions, with new keys, to a worker; their deadlines start.

        Args:
            worker: Name of the worker.
            capacity: Limit of the number of sessions.
            wait_s: Seconds to wait for the first session.

        Raises:
            GatewayError: The journal cannot be written; the sessions stay queued.
        """
        taken: list[GatewaySession] = []
        if wait_s == 0 and not self._filled.is_set():
            self._seen[worker] = _now()
            return []
        self._polls[worker] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s), self._turn:
                    while not taken and worker not in self._left:
                        await self._filled.wait()
                        taken = [] if worker in self._left else self._pop(capacity)
        finally:
            self._polls[worker] -= 1
            self._seen[worker] = _now()
        if not taken:
            return []
        keys = [self._start(session, worker) for session in taken]
        try:
            await self._journal.offered(taken)
        except BaseException:
            self._requeue(taken)
            raise
        given = [(session, key) for session, key in zip(taken, keys, strict=True) if session.closed is None]
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

    def leave(self, worker: str) -> int:
        """End the attempts of a worker that ends, and give it no more; return their number."""
        self._left.add(worker)
        self._seen[worker] = now = _now()
        attempts = [session for session in self._running() if session.worker == worker]
        for session in attempts:
            self._finisher.impose(session, FinishReport(Outcome.CANCELLED, f"worker {worker} ended"), now)
        return len(attempts)

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
        """End the sessions whose worker is lost or whose deadline passed, and forget old workers."""
        self._queue = deque(session for session in self._queue if session.closed is None)
        for session in self._running():
            silent = now - session.worker_seen
            if silent >= LOST_AFTER * (session.offer_heartbeat_s or 0.0):
                why = f"worker {session.worker} sent no heartbeat for {silent:.0f} s"
                self._finisher.impose(session, FinishReport(Outcome.INFRA_ERROR, why), now)
            elif now >= session.deadline:
                self._finisher.impose(session, FinishReport(), now)
        self._seen = {worker: seen for worker, seen in self._seen.items() if now - seen < LISTED_S}
        self._polls = +self._polls
        self._left &= self._seen.keys()

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the last minutes with their numbers of running attempts."""
        now, running = _now(), Counter(session.worker or "" for session in self._running())
        names = {*self._seen, *running, *+self._polls}
        return [
            {
                "worker": name,
                "running": running[name],
                "connected": self._polls[name] > 0
                or running[name] > 0
                or now - self._seen.get(name, -math.inf) < BETWEEN_POLLS_S,
                "seen_s": round(now - self._seen.get(name, now), 1),
            }
            for name in sorted(names)
        ]

    def _running(self) -> list[GatewaySession]:
        return [
            session
            for session in self._sessions.all()
            if session.worker is not None and session.ending is None
        ]

    def _pop(self, capacity: int) -> list[GatewaySession]:
        taken: list[GatewaySession] = []
        while self._queue and len(taken) < capacity:
            session = self._queue.popleft()
            if session.closed is None:
                taken.append(session)
        if not self._queue:
            self._filled.clear()
        return taken

    def _start(self, session: GatewaySession, worker: str) -> str:
        """Give a session to a worker and return its new key; the key that opened it is void."""
        assert session.deadline_s is not None, "it is set when the session is opened"
        now, key = _now(), new_key()
        session.worker, session.worker_seen = worker, now
        session.opened, session.deadline = now, now + session.deadline_s
        self._sessions.set_key(session, key)
        return key

    def _requeue(self, sessions: Sequence[GatewaySession]) -> None:
        for session in reversed(sessions):
            session.worker, session.deadline = None, math.inf
            self._queue.appendleft(session)
            self._filled.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
