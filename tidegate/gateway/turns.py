"""Turns: from a request to a recorded reply, whatever dialect it came in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from tidegate.errors import EngineError, GatewayError
from tidegate.gateway.accesslog import log_turn
from tidegate.gateway.ask import Ask
from tidegate.gateway.calls import Call
from tidegate.gateway.dispatch import QueueFullError
from tidegate.gateway.formats.base import Form
from tidegate.gateway.journal import Journal
from tidegate.gateway.limits import check_limits
from tidegate.gateway.metrics import Metrics
from tidegate.gateway.pool import EnginePool
from tidegate.gateway.prompts import Prompts
from tidegate.gateway.protocol import RequestRefusedError, Sampled
from tidegate.gateway.refusal import engine_failure, not_recorded, queue_full, refused_by_engine
from tidegate.gateway.render import Renderer
from tidegate.gateway.sessions import Session
from tidegate.gateway.tree import Node

log = logging.getLogger("tidegate.gateway")
ABANDONED = "the call was abandoned"


class Turns:
    """Makes turns: places a request in its session's tree, has it sampled, records what came."""

    def __init__(
        self,
        renderer: Renderer,
        pool: EnginePool,
        metrics: Metrics,
        journal: Journal,
        form: Form,
        model_context: int | None,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._journal = journal
        self.prompts = Prompts(
            renderer, pool, metrics, form, model_context, lambda *turn: self._delivered(*turn)
        )

    def call(self, session: Session, ask: Ask) -> Call:
        """The call that answers a request: a new one, or the one that it repeats. Raises Refusal.

        It is done when its turn is recorded for good: only then may the reply go out.
        """
        now = asyncio.get_running_loop().time()
        session.check_open(now)
        repeated = session.calls.retried(ask.digest, ask.idempotency_key, ask.retry)
        if repeated is not None:
            self._metrics.retries_joined += 1
        if isinstance(repeated, Call):
            return repeated
        if isinstance(repeated, Node):
            call = self.prompts.recall(ask, repeated)
            self._begin(session, call, self._repeat(session, call, repeated))
        else:
            call = self.prompts.prepare(session, ask, check_limits(session, now))
            session.calls.add(call)
            self._begin(session, call, self._generate(session, call))
        return call

    def count(self, session: Session, ask: Ask) -> int:
        """How many tokens the prompt of a request has. Raises Refusal."""
        session.check_open(asyncio.get_running_loop().time())
        return self.prompts.count(session, ask)

    def _begin(self, session: Session, call: Call, work: Coroutine[Any, Any, None]) -> None:
        call.task = asyncio.create_task(work, name=f"call {call.id}")
        call.task.add_done_callback(lambda task: self._ended(session, call, task))

    async def _repeat(self, session: Session, call: Call, node: Node) -> None:
        call.prompt_tokens = len(session.tree.sequence(node.turn.index)) - len(node.turn.output_ids)
        call.on_ids(node.turn.output_ids.tolist())
        call.reader.finish()
        call.reader.call_ids = [one["id"] for one in node.reply.get("tool_calls") or ()]
        await self._commit(session, call, node)

    async def _generate(self, session: Session, call: Call) -> None:
        on_ids = call.on_ids if call.order.stream else None
        try:
            sampled = await self._pool.sample(call.order, session.seat, session.deadline, on_ids)
        except QueueFullError as error:
            session.gave_up = str(error)
            call.refusal = queue_full(str(error))
            return
        except EngineError as error:
            blamed = None
            if isinstance(error, RequestRefusedError):
                blamed = refused_by_engine(call.order.asked, error.reason)
            if blamed is None:
                session.gave_up = str(error)
            call.refusal = blamed or engine_failure(str(error))
            return
        call.on_ids(sampled.ids)
        call.reader.finish()
        node = self._append(session, call, sampled)
        session.unwritten[node.turn.index] = node
        await self._commit(session, call, node)

    async def _commit(self, session: Session, call: Call, node: Node) -> None:
        """Wait until a turn is written, with those before it that could not be; the call is done then."""
        index = node.turn.index
        if index in session.unwritten:
            self._write(session)
        if (writing := session.writing.get(index)) is not None:
            try:
                await asyncio.shield(writing)  # the turn is there, whether or not somebody listens
            except GatewayError as error:
                call.refusal = not_recorded(str(error))
                return
        call.node = node

    def _write(self, session: Session) -> None:
        nodes = [session.unwritten[index] for index in sorted(session.unwritten)]
        writing = self._journal.recorded(session, nodes)
        session.unwritten.clear()
        session.writing |= {node.turn.index: writing for node in nodes}
        writing.add_done_callback(lambda _: self._written(session, nodes, writing))

    def _written(self, session: Session, nodes: list[Node], writing: asyncio.Future[None]) -> None:
        failed = writing.cancelled() or writing.exception() is not None
        for node in nodes:
            del session.writing[node.turn.index]
            if failed:
                session.unwritten[node.turn.index] = node
                session.calls.remember(node)

    def _append(self, session: Session, call: Call, sampled: Sampled) -> Node:
        turn = call.turn(sampled)
        reply = call.reader.message()
        node = session.tree.append(turn, call.order.prompt, call.place, call.said, reply, call.request)
        metrics = self._metrics
        metrics.turns += 1
        metrics.undelivered_turns += 1
        metrics.prompt_tokens += call.prompt_tokens
        metrics.output_tokens += len(sampled.ids)
        metrics.cached_tokens += sampled.cached_tokens
        metrics.unknown_version_turns += turn.oldest_version() is None
        if turn.branch is not None:
            metrics.branches[turn.branch.partition(":")[0]] += 1
        if turn.parse is not None:
            metrics.parses[turn.parse] += 1
        metrics.turn_seconds.add(turn.seconds)
        log_turn(session, turn, call.prompt_tokens)
        return node

    def _ended(self, session: Session, call: Call, task: asyncio.Task[None]) -> None:
        """Whatever happened in a call, who listens learns of it."""
        if task.cancelled():
            call.refusal = call.refusal or engine_failure(ABANDONED)
        elif (error := task.exception()) is not None:
            log.error("session %s: a call failed in the gateway", session.id, exc_info=error)
            session.gave_up = f"the gateway failed: {error!r}"
            call.refusal = engine_failure("the gateway failed on this call; its log says why")
        session.calls.settle(call)
        call.wake()

    def abandon(self, session: Session, call: Call) -> None:
        """A listener left without the reply; with the last one the generation is aborted."""
        if not call.bells and not call.done and call.task is not None:
            self._metrics.abandoned_calls += 1
            session.calls.abandoned(call)
            # At once: who comes back before the task has heard of it must not wait for a reply.
            call.refusal = call.refusal or engine_failure(ABANDONED)
            call.task.cancel()

    def deliver(self, session: Session, call: Call) -> None:
        """The reply goes out now, to a client that is still there: nothing may be awaited before that."""
        session.calls.delivered(call)
        assert call.node is not None, "only a reply that is there is delivered"
        self._delivered(session, call.node.turn.index)
        session.gave_up = session.interrupted = session.overflowed = None

    def sent(self, session: Session, call: Call) -> None:
        """The whole reply went out."""
        assert call.node is not None, "only a reply that is there is sent"
        self._journal.sent(session, call.node.turn.index)

    def _delivered(self, session: Session, index: int) -> None:
        if not session.tree.nodes[index].turn.delivered:
            self._metrics.undelivered_turns -= 1
            session.tree.delivered(index)
