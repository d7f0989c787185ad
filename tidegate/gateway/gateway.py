"""Implements the operations of a gateway, on which the HTTP routes are built."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from tidegate.errors import GatewayError
from tidegate.gateway.attempts import AttemptQueue
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.environments.calls import EnvironmentCalls
from tidegate.gateway.environments.states import EpisodeStates
from tidegate.gateway.groups.finish import SessionFinisher
from tidegate.gateway.groups.rewards import Scorer
from tidegate.gateway.groups.sealing import GroupSealer
from tidegate.gateway.groups.spans import EpisodeSpans
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.ids import hash_key, new_id, new_key
from tidegate.gateway.journal.base import Journal, Recovered
from tidegate.gateway.journal.sqlite import DiskJournal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.policies import ServedPolicies
from tidegate.gateway.project_keys import KeyFile
from tidegate.gateway.registered_engines import RegisteredEngines
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.sessions.session import (
    FinishReport,
    GatewaySession,
    SessionRequest,
    SessionResult,
    trajectory_of,
)
from tidegate.gateway.sessions.store import SessionStore
from tidegate.gateway.turns.pipeline import TurnPipeline
from tidegate.gateway.turns.request_reader import HeldBodies, Threads
from tidegate.service import exact
from tidegate.service.tracing import Spans, check_tracing
from tidegate.settings.servers import MAX_KEPT
from tidegate.types import Outcome, Trajectory, fields_of

log = logging.getLogger("tidegate.gateway")
SWEEP_S = 1.0


class Gateway:
    """State of one gateway. `start` and `close` must be called on the event loop that it runs on."""

    def __init__(self, options: GatewayOptions, renderer: Renderer | None = None) -> None:
        self.options = options
        if options.tracing:
            check_tracing("gateway.tracing")
        self.keys = KeyFile(options.keys)
        self.metrics = GatewayMetrics()
        self.pool = EnginePool(options.pool, self.fail)
        self.policies = ServedPolicies(options, self.pool, self.metrics, renderer)
        self.renderer = self.policies.default.renderer
        # After what may be refused, as a journal is locked until it is closed.
        self.journal = Journal() if options.journal is None else DiskJournal(options.journal)
        self.instance = new_id()
        self.sessions = SessionStore()
        self.threads = Threads()
        self.bodies = HeldBodies()
        self.groups = GroupStore(
            self.journal,
            self.sessions.of_group,
            options.id_prefix,
            on_new_epoch=lambda: self.finisher.cancel_older(),
        )
        self.sealer = GroupSealer(options.environments, self.sessions, self.groups)
        self.scorer = Scorer(options.environments, list(options.policies))
        self.states = EpisodeStates(options.environments, self.journal, options.grace_s)
        self.environments = EnvironmentCalls(self.states, self.journal, self.metrics)
        self.spans = EpisodeSpans(Spans("tidegate-gateway")) if options.tracing else None
        self.finisher = SessionFinisher(
            self.journal,
            self.sessions,
            self.groups,
            self.scorer,
            self.states,
            self.metrics,
            grace_s=options.grace_s,
            retention_s=options.retention_s,
            spans=self.spans,
        )
        self.attempts = AttemptQueue(
            self.journal, self.sessions, self.finisher, self.states, options.id_prefix
        )
        prompts = {name: policy.prompts for name, policy in self.policies.by_name.items()}
        self.engines = RegisteredEngines(self.pool, self.journal, self.policies)
        self.turns = TurnPipeline(prompts, self.pool, self.metrics, self.journal)
        self._failed: str | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def failed(self) -> str | None:
        """Failure of the gateway itself, which `/health` reports; None if there is none."""
        return self._failed or self.journal.problem

    async def start(self) -> None:
        """Restores the journal's state and starts. Raises StartError if the journal cannot be used."""
        await asyncio.to_thread(self.policies.check_templates)
        if self.options.environments is not None:
            await self.options.environments.start()
        recovered = self.journal.load()
        self.groups.restore(recovered)
        await self.engines.restore(recovered, self.options.engine_urls)
        self._resume_sessions(recovered)
        self._sweeper = asyncio.create_task(self._sweep(), name="session sweeper")
        self._sweeper.add_done_callback(self._on_sweeper_done)

    async def close(self) -> None:
        for session in self.sessions.all():
            session.close("the gateway stopped")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self.threads.close()
        await self.sealer.close()
        await self.states.close(keep=self.options.journal is not None)
        await self.pool.close()
        await self.journal.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    def _resume_sessions(self, recovered: Recovered) -> None:
        """Restores the journal's sessions and finishes those that were being finished."""
        now = asyncio.get_running_loop().time()
        for session in recovered.sessions:
            # Times are stored by a clock that may have been set back since: nothing is kept for longer.
            if session.deadline < math.inf and session.deadline_s is not None:
                session.deadline = min(session.deadline, now + session.deadline_s)
            if session.forget_at is not None:
                session.forget_at = min(session.forget_at, now + self.options.retention_s)
            self.sessions.add(session)
            self.attempts.restore(session)
            self.states.restore(session)
            if not session.finished and session.ending is not None:
                self.finisher.start_finishing(session)
        self.finisher.cancel_older()
        if recovered.sessions:
            log.info("restored %d sessions from the journal", len(recovered.sessions))

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(
        self, request: SessionRequest, client: str | None = None, conversation: str | None = None
    ) -> tuple[GatewaySession, str]:
        """Opens a session and returns it with its key, of which only a hash is stored. Raises GatewayError.

        `client` is the name of the project key that opens it, if one does; `conversation` is the name of its
        conversation, empty without one, if its calls are made with the project key.

        A session with a trainer's epoch ends as `cancelled` when a newer trainer takes over. An offered one
        is queued for workers; the worker that takes it gets a new key.
        """
        sampling, group_id, task = request.sampling, request.group_id, request.task
        if request.split == "train" and (
            sampling.temperature <= 0 or (sampling.narrows and not 0 < sampling.top_k <= MAX_KEPT)
        ):
            raise GatewayError(
                f"split train needs temperature > 0, and with top_p, top_k or min_p a top_k from 1 to "
                f"{MAX_KEPT}, which bounds the ids that are recorded for each token; it has temperature = "
                f"{sampling.temperature:g} and top_k = {sampling.top_k}",
                status=400,
            )
        if request.offer_heartbeat_s is not None and task is None:
            raise GatewayError("a session that is offered to workers needs a task", status=400)
        if group_id is not None and (self.groups.get(group_id) or self.groups.end_reason(group_id)):
            raise GatewayError(f"group {group_id} accepts no more sessions", status=410)
        _check_storable(request.env, group_id, request.slot, request.metadata, task and (task.id, task.env))
        await self.groups.begin_epoch(request.trainer_epoch)
        key = new_key(self.options.id_prefix, request.key)
        session = self.sessions.with_key(key)
        if session is None:
            session = self._new_session(request, key, client, conversation)
            self._write_opened(session)
            self.sessions.add(session)
        if session.opening is not None:
            await asyncio.shield(session.opening)  # one write, which repeated requests share
        return session, key

    def _write_opened(self, session: GatewaySession) -> None:
        def written(opening: asyncio.Future[None]) -> None:
            if opening.exception() is not None:
                self.sessions.forget(session)
            elif session.offer_heartbeat_s is not None:
                self.attempts.add(session)
            else:
                self.states.start(session)

        session.opening = self.journal.opened(session)
        session.opening.add_done_callback(written)

    def _new_session(
        self, request: SessionRequest, key: str, client: str | None, conversation: str | None
    ) -> GatewaySession:
        options, now = self.options, asyncio.get_running_loop().time()
        deadline_s = options.session_deadline_s if request.deadline_s is None else request.deadline_s
        arguments = fields_of(request) | {
            "env": request.env or (request.task.env if request.task is not None else ""),
            "limits": request.limits.with_defaults(options.limits),
            "untrained_models": (*options.untrained_models, *request.untrained_models),
            "deadline_s": deadline_s,
            "key": None,
        }
        return GatewaySession(
            id=new_id(options.id_prefix),
            key_hash=hash_key(key),
            opened=now,
            deadline=now + deadline_s if request.offer_heartbeat_s is None else math.inf,
            number=self.sessions.next_number(),
            client=client,
            conversation=conversation,
            **arguments,
        )

    def session(self, session_id: str) -> GatewaySession:
        session = self.sessions.get(session_id)
        if session is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        return session

    async def post_reward(
        self,
        session_id: str,
        name: str,
        value: float,
        turn: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Records a part of a session's or a turn's reward; a repeated name replaces the earlier value.

        `metadata` is added to the session's.
        """
        session = self.session(session_id)
        if session.closed is not None:
            raise GatewayError(f"session {session_id} is over ({session.closed})", status=410)
        _check_storable(name)
        if turn is None:
            session.rewards[name] = value
        elif turn < len(session.tree.nodes):
            session.turn_rewards.setdefault(turn, {})[name] = value
        else:
            raise GatewayError(
                f"session {session_id} has no turn {turn}; it has {len(session.tree.nodes)}", status=400
            )
        session.metadata |= metadata or {}
        await self.journal.rewarded(session, name, value, turn, annotated=bool(metadata))

    async def finish(
        self, session_id: str, report: FinishReport, epoch: int | None = None, wait_s: float | None = None
    ) -> Trajectory | None:
        """Refuses further calls of a session, computes its reward and stores its trajectory. Idempotent.

        Returns None if the reward is not ready after `wait_s`. Raises GatewayError for an unknown
        session, or if a newer trainer took over.
        """
        await self.groups.begin_epoch(epoch)
        session = self.session(session_id)
        await self.turns.close_streams(session)
        return await self.finisher.finish(session, report, asyncio.get_running_loop().time(), wait_s)

    async def result(self, session_id: str, wait_s: float) -> Trajectory | None:
        """Waits for the end of a session; None if it has not ended after `wait_s`. Raises GatewayError."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.session(session_id).ended.wait(), wait_s)
        return self.session(session_id).trajectory

    async def delete_session(self, session_id: str) -> None:
        """Deletes a session and its turns. Idempotent. Raises GatewayError."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.group_id is not None and self.groups.get(session.group_id) is not None:
            raise GatewayError(
                f"session {session_id} is in the sealed group {session.group_id}; end the group instead",
                status=400,
            )
        await self.finisher.forget([session])

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.keys.reload()
            self.attempts.expire(asyncio.get_running_loop().time())
            await self.finisher.expire(asyncio.get_running_loop().time())

    def _on_sweeper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fail(f"the session sweeper failed: {task.exception()!r}")

    def fail(self, reason: str) -> None:
        """Records a failure of the gateway itself, which `/health` reports."""
        self._failed = reason
        log.error("%s", reason)

    # -- groups ----------------------------------------------------------------------------------

    async def seal(
        self,
        group_id: str,
        task_id: str,
        session_ids: list[str],
        epoch: int | None = None,
        wait_s: float | None = None,
    ) -> bool:
        """Makes a group of finished sessions ready. Arguments and result are those of `GroupSealer.seal`.

        On a gateway that a trainer manages, only its own groups and those of clients with a project key are
        accepted: others are in no ledger.
        """
        await self.groups.begin_epoch(epoch)
        if self.groups.get(group_id) is not None:
            return True
        by_client = any(member.client is not None for member in self.sessions.of_group(group_id))
        if epoch is None and self.pool.trainer_managed and not by_client:
            raise GatewayError(
                f"group {group_id} cannot be sealed: a trainer manages this gateway and trains only on "
                "groups that it issued. Use a gateway that no trainer manages, and lease the group there",
                status=403,
            )
        _check_storable(task_id)
        return await self.sealer.seal(group_id, task_id, session_ids, epoch, wait_s)

    async def ack(self, epoch: int, lease_id: str, outcome: str, why: str | None = None) -> None:
        """Ends a lease, its group and the group's sessions. Idempotent."""
        _check_storable(lease_id, outcome, why)
        for session in await self.groups.ack(epoch, lease_id, outcome, why):
            self.sessions.forget(session)

    async def drop(
        self, group_id: str, epoch: int | None = None, reason: str | None = None
    ) -> list[Trajectory]:
        """Ends a group and its sessions, for a `reason`; returns what they recorded. Idempotent."""
        _check_storable(reason)
        await self.groups.begin_epoch(epoch)
        why = "its group was dropped" + ("" if reason is None else f": {reason}")
        self._stop_sessions(group_id, why)
        result = SessionResult(Outcome.CANCELLED, why, asyncio.get_running_loop().time())
        recorded = []
        for session in await self.groups.drop(group_id, epoch, reason):
            recorded.append(session.trajectory or trajectory_of(session, result))
            self.sessions.forget(session)
        return recorded

    async def erase(self, group_id: str) -> None:
        """Deletes all that is recorded of a group, which may have ended. Idempotent."""
        self._stop_sessions(group_id, "its client erased it")
        for session in await self.groups.erase(group_id):
            self.sessions.forget(session)

    def _stop_sessions(self, group_id: str, why: str) -> None:
        self.sealer.forget(group_id)
        for session in self.sessions.of_group(group_id):
            session.stop(why)


def _check_storable(*values: Any) -> None:
    """Raises GatewayError for values that cannot be stored, as they would block their group's lease."""
    try:
        exact.pack(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise GatewayError(f"the values cannot be stored: {error}", status=400) from None
