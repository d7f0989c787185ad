"""Runs a turn: joins retries, checks limits, generates the reply and records it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import orjson

from tidegate.errors import EngineError, GatewayError
from tidegate.gateway.engines.dispatcher import QueueFullError
from tidegate.gateway.engines.pool import LAST_EVENT_S, EnginePool
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError, SlowEnginesError
from tidegate.gateway.errors import (
    engine_failure,
    not_recorded,
    queue_full,
    refused_by_engine,
    session_closed,
)
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.rendering.renderer import LargeText
from tidegate.gateway.sessions.model_calls import ModelCall, RawBody, TurnRequest
from tidegate.gateway.sessions.session import GatewaySession, check_limits
from tidegate.gateway.sessions.tree import TurnNode, TurnRequestInfo
from tidegate.gateway.turns.prompts import PromptBuilder, Rendered, mark_delivered
from tidegate.turn import CLIENT_CLOSED, Turn

log = logging.getLogger("tidegate.gateway")
access_log = logging.getLogger("tidegate.gateway.access")
"""One JSON line per turn, at level INFO."""
ABANDONED = "the call was abandoned"


class TurnPipeline:
    """Attaches requests to their session's tree, samples the replies and records the turns."""

    def __init__(
        self,
        prompts: Mapping[str, PromptBuilder],
        pool: EnginePool,
        metrics: GatewayMetrics,
        journal: Journal,
    ) -> None:
        self.prompts = prompts
        """By the name of their policy."""
        self._pool = pool
        self._metrics = metrics
        self._journal = journal

    def call(
        self,
        session: GatewaySession,
        request: TurnRequest,
        rendered: Rendered | None = None,
        *,
        inline: bool = True,
    ) -> ModelCall:
        """Returns the call for a request: a new one, or the one that the request repeats. The call is done
        when its turn is written to the journal; only then may the reply be sent. Raises ApiError, and
        LargeText if the prompt must be rendered in a thread and passed as `rendered`."""
        now = asyncio.get_running_loop().time()
        # Before the search for a repeated call: the record of a session that has ended must not change.
        session.check_open(now)
        prompts = self.prompts[request.policy]
        repeated = session.calls.find_repeated(request)
        # The turn has only the part that was delivered before the client closed the stream; its retry
        # wants a complete reply.
        if isinstance(repeated, TurnNode) and repeated.turn.finish_reason == CLIENT_CLOSED:
            self._supersede(session, repeated)
            repeated = None
        if repeated is not None:
            self._metrics.retries_joined += 1
        if isinstance(repeated, ModelCall):
            return repeated
        if isinstance(repeated, TurnNode):
            call = prompts.recorded_call(request, repeated)
            self._start(session, call, self._repeat(session, call, repeated))
        else:
            # After the search: a retry uses nothing of a budget, so an exhausted one must not refuse it.
            token_budget = check_limits(session, now)
            if rendered is None:
                if not inline:
                    raise LargeText
                attachment = prompts.attach(session, request)
                try:
                    rendered = prompts.render(session, request, attachment, inline=True)
                except LargeText as error:
                    # The request is attached again for the thread, and is then compared with itself,
                    # which yields no reason.
                    error.branch_reason = None if attachment is None else attachment.branch_reason
                    raise
            call = prompts.prepare(session, request, rendered, token_budget)
            # No await since the search for a repeated call: a retry in between would start a second
            # generation.
            session.calls.add(call)
            self._start(session, call, self._generate(session, call))
        return call

    def _start(self, session: GatewaySession, call: ModelCall, work: Coroutine[Any, Any, None]) -> None:
        call.task = asyncio.create_task(work, name=f"call {call.id}")
        call.task.add_done_callback(lambda task: self._on_done(session, call, task))

    async def _repeat(self, session: GatewaySession, call: ModelCall, node: TurnNode) -> None:
        call.prompt_tokens = len(session.tree.sequence(node.turn.index)) - len(node.turn.output_ids)
        call.on_ids(node.turn.output_ids.tolist())
        call.reader.finish()
        # The client may have read these ids in the first reply, and the tree has them.
        call.reader.call_ids = [tool_call["id"] for tool_call in node.reply.get("tool_calls") or ()]
        await self._commit(session, call, node)

    async def _generate(self, session: GatewaySession, call: ModelCall) -> None:
        on_ids = call.on_ids if call.engine_request.stream else None
        policy = call.request.policy
        # Disruptions of earlier calls do not explain the failure of this one.
        affinity = session.affinity_of(policy, self.prompts[policy].policy.engines)
        before, began = affinity.disruptions, asyncio.get_running_loop().time()
        try:
            result = await self._pool.sample(call.engine_request, affinity, session.deadline, on_ids)
        except asyncio.CancelledError:
            if affinity.disruptions > before:  # the outage, not the agent, is the cause
                session.engine_error = session.engine_outage
            # The session may have been closed at its deadline before the timeout of this call had its turn.
            elif asyncio.get_running_loop().time() >= session.deadline and (
                load := call.engine_request.load()
            ):
                session.note_slow(load, began)
                call.refusal = session_closed(f"its deadline passed: {load}")
            raise
        except QueueFullError as error:
            if (load := call.engine_request.load()) is None:
                session.engine_error = str(error)
                # A full queue without a serving engine is an outage, so the timeout that may follow is
                # not the agent's.
                affinity.disruptions += 1
            else:
                session.note_slow(f"{error}; {load}", began)
            call.refusal = queue_full(str(error))
            return
        except SlowEnginesError as error:
            if affinity.disruptions > before:
                session.engine_error = session.engine_outage
            session.note_slow(str(error), began)
            call.refusal = session_closed(f"its deadline passed: {error}")
            return
        except EngineError as error:
            refusal = None
            if isinstance(error, RequestRefusedError):
                refusal = refused_by_engine(call.engine_request.requested_as, error.reason)
            # An engine that refuses the client's own parameters has not failed: the agent can correct the
            # request.
            if refusal is None:
                session.engine_error = str(error)
            call.refusal = refusal or engine_failure(str(error))
            return
        if call.engine_request.closed:
            # Tokens after the part that the client read have no place in the next prompt.
            result.truncate(call.delivered_ids(result.ids))
            result.finish = CLIENT_CLOSED
        else:
            call.on_ids(result.ids)
            call.reader.finish()
        node = self._append(session, call, result)
        if call.engine_request.closed:
            mark_delivered(session, node.turn.index, self._metrics)
        # Before the first await: a cancelled task would otherwise leave a turn in the tree that is never
        # written.
        session.unpersisted[node.turn.index] = node
        await self._commit(session, call, node)

    async def _commit(self, session: GatewaySession, call: ModelCall, node: TurnNode) -> None:
        """Waits until the journal has a turn and earlier ones whose write failed; then the call is done."""
        index = node.turn.index
        if index in session.unpersisted:
            self._write(session)
        if (writing := session.pending_writes.get(index)) is not None:
            try:
                await asyncio.shield(writing)  # a cancelled call must not cancel the write
            except GatewayError as error:
                call.refusal = not_recorded(str(error))
                return
        call.node = node
        # The stream may have been closed during the write, which contains the complete reply.
        if call.engine_request.closed:
            self._cut(session, call)

    def _write(self, session: GatewaySession) -> None:
        nodes = [session.unpersisted[index] for index in sorted(session.unpersisted)]
        writing = self._journal.recorded(session, nodes)
        # Moved before the commit, so that a concurrent call does not write the same turns again.
        session.unpersisted.clear()
        session.pending_writes |= {node.turn.index: writing for node in nodes}
        writing.add_done_callback(lambda _: self._on_written(session, nodes, writing))

    def _on_written(
        self, session: GatewaySession, nodes: list[TurnNode], writing: asyncio.Future[None]
    ) -> None:
        failed = writing.cancelled() or writing.exception() is not None
        for node in nodes:
            # A turn that was truncated meanwhile is in a newer write, for which others may wait.
            if session.pending_writes.get(node.turn.index) is writing:
                del session.pending_writes[node.turn.index]
            if failed:
                session.unpersisted[node.turn.index] = node
                # Its call has failed, so only the turn can answer a retry.
                session.calls.add_recorded(node)

    def _append(self, session: GatewaySession, call: ModelCall, result: GenerateResult) -> TurnNode:
        turn = call.turn(result)
        prompt, reply = call.engine_request.prompt, call.reader.message()
        identity = TurnRequestInfo(call.id, call.request.digest, call.request.idempotency_key, call.ordinal)
        node = session.tree.append(turn, prompt, call.attachment, call.new_messages, reply, identity)
        metrics = self._metrics
        metrics.turns += 1
        metrics.undelivered_turns += 1
        metrics.prompt_tokens += call.prompt_tokens
        metrics.output_tokens += len(result.ids)
        metrics.cached_tokens += result.cached_tokens
        metrics.unknown_version_turns += turn.oldest_version() is None
        metrics.client_closed_turns += turn.finish_reason == CLIENT_CLOSED
        if turn.branch is not None:
            metrics.branches[turn.branch.partition(":")[0]] += 1
        if turn.parse is not None:
            metrics.tool_call_parses[turn.parse] += 1
        metrics.turn_seconds.observe(turn.seconds)
        _log_turn(session, turn, call.prompt_tokens)
        return node

    def _on_done(self, session: GatewaySession, call: ModelCall, task: asyncio.Task[None]) -> None:
        """Ends a call and notifies its listeners."""
        if task.cancelled():
            call.refusal = call.refusal or engine_failure(ABANDONED)
        elif (error := task.exception()) is not None:
            log.error("session %s: internal error in a call", session.id, exc_info=error)
            session.engine_error = f"internal gateway error: {error!r}"
            call.refusal = engine_failure(
                "internal gateway error while handling this call; see the gateway log"
            )
        session.calls.on_done(call)
        # Last, as listeners read the refusal and the state that is set above.
        call.notify()

    def on_disconnect(self, session: GatewaySession, call: ModelCall, *, closed: bool = False) -> None:
        """Handles a listener that disconnected early; the last one to do so aborts the generation. If the
        client closed a stream, the turn keeps the part that was delivered."""
        # A retry may have joined, and still wants the reply.
        if call.listeners or call.refusal is not None or call.task is None:
            return
        # Without a part that the client read, nothing of the reply can be in its next request.
        if call.delivered_parts and closed:
            self._close(session, call)
        elif not call.done:
            self._metrics.abandoned_calls += 1
            session.calls.on_abandoned(call)
            if (load := call.engine_request.load()) is not None:
                session.note_slow(load, asyncio.get_running_loop().time() - call.seconds, given_up=True)
            # Set at once, so that a retry that arrives before the task ends does not join this call.
            call.refusal = call.refusal or engine_failure(ABANDONED)
            call.task.cancel()

    def deliver(self, session: GatewaySession, call: ModelCall) -> None:
        """Marks a reply as delivered; the caller must send it without awaiting anything in between."""
        session.calls.on_delivered(call)
        mark_delivered(session, call.recorded.turn.index, self._metrics)
        session.forget_failures()

    def _close(self, session: GatewaySession, call: ModelCall) -> None:
        # Its retry must not join a reply that ends at the closed part.
        session.calls.forget(call)
        session.forget_failures()
        call.engine_request.close()
        if call.node is not None:
            self._cut(session, call)

    def _cut(self, session: GatewaySession, call: ModelCall) -> None:
        """Truncates a recorded turn to the delivered part."""
        session.calls.on_delivered(call)
        node = call.recorded
        # The complete reply was sent before the disconnect was processed: the client has all of it.
        if node.turn.delivered:
            return
        self._metrics.client_closed_turns += 1
        count = call.delivered_ids(node.turn.output_ids.tolist())
        session.tree.truncate(node.turn.index, count, call.reader.message())
        mark_delivered(session, node.turn.index, self._metrics)
        session.unpersisted[node.turn.index] = node
        self._write(session)

    def _supersede(self, session: GatewaySession, node: TurnNode) -> None:
        """Makes a retry replace a partly delivered turn."""
        session.calls.on_superseded(node)
        # A later request has this reply in its history: it was received, whatever the retry says.
        if not node.quoted and node.turn.delivered:
            node.turn.delivered = False
            self._metrics.undelivered_turns += 1
            session.unpersisted[node.turn.index] = node

    async def wait_for_closed_streams(
        self, session: GatewaySession, body: RawBody = b"", turn_requests: Sequence[TurnRequest] = ()
    ) -> None:
        """Waits until closed streams are recorded. This includes open streams that the request refers to or
        quotes: their client has closed them, and the gateway has not yet processed it."""
        quoted = [
            call
            for call in session.calls.running
            if call.engine_request.closed
            or (
                call.delivered_parts and (call.id.encode() in body or any(map(call.quoted_by, turn_requests)))
            )
        ]
        tasks = {call.task for call in quoted if call.task is not None}
        # `asyncio.wait` raises for an empty set.
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_EVENT_S)

    async def close_streams(self, session: GatewaySession) -> None:
        """Records the delivered parts of the streams that are open when their session ends."""
        # A copy, as the end of a call removes it from the set.
        for call in list(session.calls.running):
            if call.delivered_parts and not call.engine_request.closed:
                self._close(session, call)
        await self.wait_for_closed_streams(session)


def _log_turn(session: GatewaySession, turn: Turn, prompt_tokens: int) -> None:
    """Writes a line of the access log: session and token counts, but no text, token ids or keys."""
    if not access_log.isEnabledFor(logging.INFO):
        return
    row = {
        "session": session.id,
        "turn": turn.index,
        "parent": turn.parent,
        "group": session.group_id,
        "prompt_tokens": prompt_tokens,
        "output_tokens": len(turn.output_ids),
        "cached_tokens": turn.cached_tokens,
        "finish": turn.finish_reason,
        "versions": [span.version for span in turn.version_spans],
        "branch": turn.branch,
        **({"policy": turn.policy} if turn.policy else {}),
        "seconds": round(turn.seconds, 4),
    }
    access_log.info("%s", orjson.dumps(row).decode())
