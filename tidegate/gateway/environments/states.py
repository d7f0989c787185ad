"""Makes the states of a gateway's episodes when they start, and releases them when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from tidegate.gateway.environments.base import EnvironmentInfo, EnvironmentService
from tidegate.gateway.errors import environment_failure
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.sessions.session import GatewaySession

log = logging.getLogger("tidegate.gateway")
SETUP_S = 600.0
"""Limit of the setup of one state; the environment service has shorter ones of its own."""
TEARDOWN_S = 60.0
"""Limit of the release of one state."""
SCORING_S = 1800.0
"""Time after a session's deadline for which its state is kept at most, as rewards may need it."""


@dataclass(eq=False, slots=True)
class _Owner:
    """The task that makes a session's state, waits for the session's end and releases the state."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the state is there, or is lost."""
    task: asyncio.Task[None] | None = None


class EpisodeStates:
    """States of the sessions whose environment has one. A state is owned by one task until it is released."""

    def __init__(self, service: EnvironmentService | None, journal: Journal, grace_s: float) -> None:
        self.service = service
        self._journal = journal
        self._keep_s = grace_s + SCORING_S
        self._owners: dict[str, _Owner] = {}
        self._kept = False

    def info(self, session: GatewaySession) -> EnvironmentInfo | None:
        """Returns what is known of a session's environment; None if it has none."""
        if self.service is None or session.task is None:
            return None
        return self.service.info(session.env)

    def start(self, session: GatewaySession) -> None:
        """Starts to make a session's state if its environment has one.

        After a restart the state is expected to be there still, if it was before.
        """
        info = self.info(session)
        if self.service is None or info is None or not info.stateful:
            return
        before, owner = self._owners.get(session.id), _Owner()
        earlier = None if before is None else before.task
        if earlier is not None:
            earlier.cancel()
        self._owners[session.id] = owner
        owning = self._own(self.service, session, owner, earlier)
        owner.task = asyncio.create_task(owning, name=f"state of {session.id}")
        owner.task.add_done_callback(lambda task: self._released(session, owner, task))

    async def _own(
        self,
        service: EnvironmentService,
        session: GatewaySession,
        owner: _Owner,
        earlier: asyncio.Task[None] | None,
    ) -> None:
        try:
            if earlier is not None:
                # Its teardown would release the state that is made here, under the same id.
                await asyncio.wait((earlier,))
            if not session.ended.is_set():
                await self._set_up(service, session)
            owner.ready.set()
            await session.ended.wait()
        finally:
            # Also after a cancellation: calls that wait for the state must not wait on.
            owner.ready.set()
            if not self._kept:
                with contextlib.suppress(TimeoutError):  # the service releases it later by itself
                    async with asyncio.timeout(TEARDOWN_S):
                        await service.teardown(session.id)

    async def _set_up(self, service: EnvironmentService, session: GatewaySession) -> None:
        """Makes the state and records that; a failure is the session's `state_lost`."""
        assert session.task is not None, "a session with a state has a task"
        keep_s = session.deadline - asyncio.get_running_loop().time() + self._keep_s
        known = session.set_up
        try:
            async with asyncio.timeout(SETUP_S):
                await service.setup(session.id, session.task, keep_s, create=not known)
                if not known:
                    session.set_up = True
                    await self._journal.set_up(session)
        except TimeoutError:
            self.lose(session, f"the environment made no state within {SETUP_S:g} s")
        except Exception as error:  # noqa: BLE001 - becomes the session's outcome
            self.lose(session, str(error) or repr(error))

    def lose(self, session: GatewaySession, why: str) -> None:
        """Records that a session's state is lost: its calls are refused, and it ends as `infra_error`."""
        if session.state_lost is None and session.closed is None:
            log.error("session %s: the environment's state is lost: %s", session.id, why)
        session.state_lost = session.state_lost or f"the environment's state is lost: {why}"

    async def wait_until_ready_or_lost(self, session: GatewaySession) -> str | None:
        """Waits until a session's state is there, or known to be lost; returns why it is lost, else None."""
        owner = self._owners.get(session.id)
        if owner is not None and not owner.ready.is_set():
            try:
                async with asyncio.timeout(SETUP_S + TEARDOWN_S):
                    await owner.ready.wait()
            except TimeoutError:
                self.lose(session, "the environment did not respond")
        return session.state_lost

    async def ready(self, session: GatewaySession) -> None:
        """Waits for the state of a session that is called. Raises ApiError if the state is lost."""
        if (lost := await self.wait_until_ready_or_lost(session)) is not None:
            raise environment_failure(lost)

    def restore(self, session: GatewaySession) -> None:
        """Continues with a session of the journal."""
        if session.offer_heartbeat_s is None or session.worker is not None or session.ended.is_set():
            self.start(session)

    def release(self, session: GatewaySession) -> None:
        """Releases a state before the session's end, as its agent did not start."""
        owner = self._owners.get(session.id)
        if owner is not None and owner.task is not None:
            # The next worker's agent must not find the state of this one.
            session.set_up = False
            owner.task.cancel()

    def _released(self, session: GatewaySession, owner: _Owner, task: asyncio.Task[None]) -> None:
        if self._owners.get(session.id) is owner:
            del self._owners[session.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session %s: its state was not released", session.id, exc_info=error)

    async def close(self, keep: bool) -> None:
        """Stops; releases all states unless `keep`: then a restarted gateway finds them."""
        self._kept = keep
        tasks = [owner.task for owner in self._owners.values() if owner.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=TEARDOWN_S)
        if self.service is not None:
            await self.service.close()
