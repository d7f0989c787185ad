"""Turns: from a request to a recorded reply, whatever dialect it came in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from tidegate.errors import EngineError, GatewayError
from tidegate.gateway.engines.dispatcher import QueueFullError
from tidegate.gateway.engines.pool import LAST_EVENT_S, EnginePool
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError
from tidegate.gateway.errors import engine_failure, not_recorded, queue_full, refused_by_engine
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat
from tidegate.gateway.rendering.renderer import LargeText, Renderer
from tidegate.gateway.request import RawBody, TurnRequest
from tidegate.gateway.sampling import StructuredOutput
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession, check_limits
from tidegate.gateway.sessions.tree import TurnNode
from tidegate.gateway.turns.access_log import log_turn
from tidegate.gateway.turns.prompts import PromptBuilder, Rendered
from tidegate.types import CLIENT_CLOSED

log = logging.getLogger("tidegate.gateway")
ABANDONED = "the call was abandoned"


class TurnPipeline:
    """Makes turns: places a request in its session's tree, has it sampled, records what came."""

    def __init__(
        self,
        renderer: Renderer,
        pool: EnginePool,
        metrics: GatewayMetrics,
        journal: Journal,
        form: ToolCallFormat,
        model_context: int | None,
        structured_output: StructuredOutput = "text",
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._journal = journal
        self.prompts = PromptBuilder(
            renderer, pool, metrics, form, model_context, lambda *turn: self._quoted(*turn), structured_output
        )

    def call(
        self,
        session: GatewaySession,
        ask: TurnRequest,
        rendered: Rendered | None = None,
        *,
        inline: bool = True,
    ) -> PendingTurn:
        """The call that answers a request: a new one, or the one that it repeats. Raises Refusal, and
        LargeText where its prompt must be rendered in a thread; `rendered` is what came of that.

        It is done when its turn is recorded for good: only then may the reply go out.
        """
        now = asyncio.get_running_loop().time()
        session.check_open(now)
        repeated = session.calls.retried(ask.digest, ask.idempotency_key, ask.retry)
        if isinstance(repeated, TurnNode) and repeated.turn.finish_reason == CLIENT_CLOSED:
            self._supersede(session, repeated)
            repeated = None
        if repeated is not None:
            self._metrics.retries_joined += 1
        if isinstance(repeated, PendingTurn):
            return repeated
        if isinstance(repeated, TurnNode):
            call = self.prompts.recall(ask, repeated)
            self._begin(session, call, self._repeat(session, call, repeated))
        else:
            left = check_limits(session, now)
            if rendered is None:
                if not inline:
                    raise LargeText
                rendered = self.prompts.render(session, ask, self.prompts.place(session, ask), inline=True)
            call = self.prompts.prepare(session, ask, rendered, left)
            session.calls.add(call)
            self._begin(session, call, self._generate(session, call))
        return call

    def check_open(self, session: GatewaySession) -> None:
        """Raises Refusal where the session takes no more requests."""
        session.check_open(asyncio.get_running_loop().time())

    def _begin(self, session: GatewaySession, call: PendingTurn, work: Coroutine[Any, Any, None]) -> None:
        call.task = asyncio.create_task(work, name=f"call {call.id}")
        call.task.add_done_callback(lambda task: self._ended(session, call, task))

    async def _repeat(self, session: GatewaySession, call: PendingTurn, node: TurnNode) -> None:
        call.prompt_tokens = len(session.tree.sequence(node.turn.index)) - len(node.turn.output_ids)
        call.on_ids(node.turn.output_ids.tolist())
        call.reader.finish()
        call.reader.call_ids = [one["id"] for one in node.reply.get("tool_calls") or ()]
        await self._commit(session, call, node)

    async def _generate(self, session: GatewaySession, call: PendingTurn) -> None:
        on_ids = call.on_ids if call.order.stream else None
        before = session.seat.disturbances
        try:
            sampled = await self._pool.sample(call.order, session.seat, session.deadline, on_ids)
        except asyncio.CancelledError:
            if session.seat.disturbances > before:  # an agent that did not wait longer is not to blame
                session.gave_up = session.disturbed
            raise
        except QueueFullError as error:
            session.gave_up = str(error)
            session.seat.disturbances += 1
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
        if call.order.closed:
            sampled.cut(call.delivered_ids(sampled.ids))
            sampled.finish = CLIENT_CLOSED
        else:
            call.on_ids(sampled.ids)
            call.reader.finish()
        node = self._append(session, call, sampled)
        if call.order.closed:
            self._delivered(session, node.turn.index)
        session.unwritten[node.turn.index] = node
        await self._commit(session, call, node)

    async def _commit(self, session: GatewaySession, call: PendingTurn, node: TurnNode) -> None:
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
        if call.order.closed:
            self._cut(session, call)

    def _write(self, session: GatewaySession) -> None:
        nodes = [session.unwritten[index] for index in sorted(session.unwritten)]
        writing = self._journal.recorded(session, nodes)
        session.unwritten.clear()
        session.writing |= {node.turn.index: writing for node in nodes}
        writing.add_done_callback(lambda _: self._written(session, nodes, writing))

    def _written(self, session: GatewaySession, nodes: list[TurnNode], writing: asyncio.Future[None]) -> None:
        failed = writing.cancelled() or writing.exception() is not None
        for node in nodes:
            if session.writing.get(node.turn.index) is writing:
                del session.writing[node.turn.index]
            if failed:
                session.unwritten[node.turn.index] = node
                session.calls.remember(node)

    def _append(self, session: GatewaySession, call: PendingTurn, sampled: GenerateResult) -> TurnNode:
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
        metrics.client_closed_turns += turn.finish_reason == CLIENT_CLOSED
        metrics.turn_seconds.add(turn.seconds)
        log_turn(session, turn, call.prompt_tokens)
        return node

    def _ended(self, session: GatewaySession, call: PendingTurn, task: asyncio.Task[None]) -> None:
        """Whatever happened in a call, who listens learns of it."""
        if task.cancelled():
            call.refusal = call.refusal or engine_failure(ABANDONED)
        elif (error := task.exception()) is not None:
            log.error("session %s: a call failed in the gateway", session.id, exc_info=error)
            session.gave_up = f"the gateway failed: {error!r}"
            call.refusal = engine_failure("the gateway failed on this call; its log says why")
        session.calls.settle(call)
        call.wake()

    def abandon(self, session: GatewaySession, call: PendingTurn, *, closed: bool = False) -> None:
        """A listener left before the end of the reply; with the last one the generation is aborted. Where
        its client closed the stream, what was delivered until then is its turn."""
        if call.bells or call.refusal is not None or call.task is None:
            return
        if call.given and closed:
            self._close(session, call)
        elif not call.done:
            self._metrics.abandoned_calls += 1
            session.calls.abandoned(call)
            # At once: who comes back before the task has heard of it must not wait for a reply.
            call.refusal = call.refusal or engine_failure(ABANDONED)
            call.task.cancel()

    def deliver(self, session: GatewaySession, call: PendingTurn) -> None:
        """The reply goes out now, to a client that is still there: nothing may be awaited before that."""
        session.calls.delivered(call)
        assert call.node is not None, "only a reply that is there is delivered"
        self._delivered(session, call.node.turn.index)
        session.gave_up = session.interrupted = session.overflowed = None

    def _close(self, session: GatewaySession, call: PendingTurn) -> None:
        session.calls.closed(call)
        session.gave_up = session.interrupted = session.overflowed = None
        call.order.close()
        if call.node is not None:
            self._cut(session, call)

    def _cut(self, session: GatewaySession, call: PendingTurn) -> None:
        """Keep of a recorded turn what was delivered of it."""
        assert call.node is not None, "only a recorded turn is cut"
        session.calls.delivered(call)
        node = call.node
        if node.turn.delivered:
            return
        self._metrics.client_closed_turns += 1
        count = call.delivered_ids(node.turn.output_ids.tolist())
        session.tree.cut(node.turn.index, count, call.reader.message())
        self._delivered(session, node.turn.index)
        session.unwritten[node.turn.index] = node
        self._write(session)

    def _supersede(self, session: GatewaySession, node: TurnNode) -> None:
        """Count the retry of a closed stream instead of what was delivered of it."""
        session.calls.superseded(node)
        if not node.quoted and node.turn.delivered:
            node.turn.delivered = False
            self._metrics.undelivered_turns += 1
            session.unwritten[node.turn.index] = node

    async def settled(
        self, session: GatewaySession, body: RawBody = b"", asks: Sequence[TurnRequest] = ()
    ) -> None:
        """Wait until closed streams are recorded, and those that a request refers to or quotes while they are
        still streamed: its client has closed them, and the gateway is about to notice."""
        quoted = [
            call
            for call in session.calls.live
            if call.order.closed
            or (call.given and (call.id.encode() in body or any(map(call.quoted_by, asks))))
        ]
        tasks = {call.task for call in quoted if call.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_EVENT_S)

    async def close_streams(self, session: GatewaySession) -> None:
        """Record what was delivered of the streams that are open as their session ends."""
        for call in list(session.calls.live):
            if call.given and not call.order.closed:
                self._close(session, call)
        await self.settled(session)

    def sent(self, session: GatewaySession, call: PendingTurn) -> None:
        """The whole reply went out."""
        assert call.node is not None, "only a reply that is there is sent"
        self._journal.sent(session, call.node.turn.index)

    def _quoted(self, session: GatewaySession, index: int) -> None:
        session.tree.nodes[index].quoted = True
        self._delivered(session, index)

    def _delivered(self, session: GatewaySession, index: int) -> None:
        if not session.tree.nodes[index].turn.delivered:
            self._metrics.undelivered_turns -= 1
            session.tree.delivered(index)
