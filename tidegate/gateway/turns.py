"""Turns: from a request to a recorded reply, whatever dialect it came in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import EngineError, GatewayError
from tidegate.gateway.accesslog import log_turn
from tidegate.gateway.calls import Call
from tidegate.gateway.dispatch import QueueFullError
from tidegate.gateway.drift import drifts
from tidegate.gateway.formats.base import Form, forced_start, single_call_stop
from tidegate.gateway.journal import Journal
from tidegate.gateway.limits import check_limits
from tidegate.gateway.messages import template_form
from tidegate.gateway.metrics import Metrics
from tidegate.gateway.pool import EnginePool
from tidegate.gateway.protocol import Order, RequestRefusedError, Sampled
from tidegate.gateway.raw import place_raw, raw_ids
from tidegate.gateway.reasoning import CLOSE as THOUGHT_END
from tidegate.gateway.reasoning import OPEN as THOUGHT_START
from tidegate.gateway.reasoning import ReasoningParser
from tidegate.gateway.refusal import (
    engine_failure,
    not_recorded,
    queue_full,
    refused_by_engine,
    unsupported,
)
from tidegate.gateway.render import Renderer, Unrenderable
from tidegate.gateway.reply import ReplyReader, stop_after
from tidegate.gateway.sampling import SamplingRules, Wishes, token_budget
from tidegate.gateway.sessions import Session
from tidegate.gateway.toolcalls import Parser, PlainParser, ToolUse
from tidegate.gateway.tree import Node, Place
from tidegate.types import Ids, Message

log = logging.getLogger("tidegate.gateway")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a reply in the one internal form that every dialect is translated to."""

    messages: list[Message]
    wishes: Wishes = field(default_factory=Wishes)
    tools: list[Any] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_options: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    """What goes to the engine as it is, instead of messages."""
    parent: int | None = None
    """The turn that it says it continues: one of those that read alike."""
    stream: bool = False
    digest: bytes = b""
    """Of the request's body."""
    idempotency_key: str | None = None
    retry: bool = False
    """The client says that it sends this again."""


def digest_of(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()


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
        self._renderer = renderer
        self._pool = pool
        self._metrics = metrics
        self._journal = journal
        self._form = form
        self._model_context = model_context
        self._sampling = SamplingRules(renderer.stop_ids)
        # Where the marker is a token of the model's own, the model was made to reason with it.
        marker = renderer.encode(THOUGHT_END)
        self.thought_end = marker[0] if len(marker) == 1 else None

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
            call = self._recall(ask, repeated)
            self._begin(session, call, self._repeat(session, call, repeated))
        else:
            call = self._prepare(session, ask, check_limits(session, now))
            session.calls.add(call)
            self._begin(session, call, self._generate(session, call))
        return call

    def _begin(self, session: Session, call: Call, work: Coroutine[Any, Any, None]) -> None:
        call.task = asyncio.create_task(work, name=f"call {call.id}")
        call.task.add_done_callback(lambda task: self._ended(session, call, task))

    def count(self, session: Session, ask: Ask) -> int:
        """How many tokens the prompt of a request has. Raises Refusal."""
        session.check_open(asyncio.get_running_loop().time())
        place = self._place(session, ask)
        place, delta, _ = self._delta(session, ask, place)
        return len(session.tree.prompt(place.parent, delta))

    def _place(self, session: Session, ask: Ask) -> Place:
        place = session.tree.place(ask.messages, ask.tools, ask.template_options)
        nodes = session.tree.nodes
        if ask.parent is None or place.parent is None or nodes[place.parent].key != nodes[ask.parent].key:
            return place
        return place._replace(parent=ask.parent)

    def _prepare(self, session: Session, ask: Ask, left: int | None) -> Call:
        """A new call, which may sample the `left` tokens of the session's budget."""
        if ask.prompt is None:
            place, delta, branch = self._delta(session, ask, self._place(session, ask))
        else:
            place, delta, branch = *self._raw(session, ask.prompt), None
            ask = replace(ask, messages=[{"role": "user", "content": self._renderer.decode(delta.tolist())}])
        reader = self._reader(ask, delta)
        if reader.begun:
            delta = np.concatenate((delta, np.asarray(self._renderer.encode(reader.begun), np.int32)))
        prompt = session.tree.prompt(place.parent, delta)
        if place.parent is not None and drifts(prompt, session.tree.nodes[place.parent].turn, len(delta)):
            branch = f"drift: the prompt does not start with what turn {place.parent} recorded"
            log.error("session %s: %s; it is recorded as a branch", session.id, branch)
            self._metrics.drifted_turns += 1
            place, delta = place._replace(parent=None, start=0), prompt
        context = self._pool.max_context or self._model_context
        budget = token_budget(len(prompt), ask.wishes.max_tokens, session.sampling, context, left)
        params = self._sampling.params(
            ask.wishes, session.sampling, session.env, session.split, session.seed, session.calls.begun
        )
        if ask.tools and (end := single_call_stop(self._form, ask.tool_use)):
            params["stop"] = [*ask.wishes.stop, end]
        order = Order(prompt, params, budget, ask.stream, self._sampling.asked(ask.wishes, session.split))
        if stops := params.get("stop"):
            order.stop_after = partial(stop_after, self._renderer.decode, stops)
        self._metrics.rendered_tokens += len(delta)
        return Call(
            ask.digest,
            place,
            delta,
            ask.messages[place.start :],
            order,
            reader,
            branch,
            ask.idempotency_key,
            session.calls.begun,
            prompt_tokens=len(prompt),
        )

    def _raw(self, session: Session, prompt: str | list[int]) -> tuple[Place, Ids]:
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else prompt
        place, delta = place_raw(session.tree, raw_ids(ids, self._renderer.codec.vocabulary))
        if place.parent is not None:
            self._delivered(session, place.parent)  # who quotes a reply has it
        return place, delta

    def _recall(self, ask: Ask, node: Node) -> Call:
        """A call whose reply is there already: the same request, whose turn is `node`, came again."""
        delta = node.turn.delta_ids
        place = Place(node.turn.parent, 0, node.asked, None, node.root)
        order = Order(delta[:0], {}, 0, ask.stream)
        call = Call(ask.digest, place, delta, node.said, order, self._reader(ask, delta))
        call.id, call.created = node.request.id, int(node.turn.started)
        call.idempotency_key, call.ordinal = node.request.idempotency_key, node.request.ordinal
        return call

    async def _repeat(self, session: Session, call: Call, node: Node) -> None:
        call.prompt_tokens = len(session.tree.sequence(node.turn.index)) - len(node.turn.output_ids)
        call.on_ids(node.turn.output_ids.tolist())
        call.reader.finish()
        call.reader.call_ids = [one["id"] for one in node.reply.get("tool_calls") or ()]
        await self._commit(session, call, node)

    def _reader(self, ask: Ask, delta: Ids) -> ReplyReader:
        """What reads the reply to a prompt that ends with `delta`."""
        if ask.prompt is not None:
            return ReplyReader(self._renderer.decode, ask.wishes.stop, PlainParser())
        calls = bool(ask.tools) and ask.tool_use.mode != "none"
        parser: Parser = self._form.parser(ask.tools or ()) if calls else PlainParser()
        forced = forced_start(self._form, ask.tool_use)
        if self.thought_end is not None:
            begun = self._renderer.decode(delta[-4:].tolist()).rstrip().endswith(THOUGHT_START)
            if begun and forced:
                raise unsupported("tool_choice", "a call cannot be forced where the prompt opens reasoning")
            parser = ReasoningParser(parser, begun)
        return ReplyReader(self._renderer.decode, ask.wishes.stop, parser, forced)

    def _delta(self, session: Session, ask: Ask, place: Place) -> tuple[Place, Ids, str | None]:
        """The ids that the request adds to its parent; a root where the template permits no other."""
        options = ask.template_options
        why = None
        if place.parent is not None:
            node = session.tree.nodes[place.parent]
            output = node.turn.output_ids
            new = [template_form(m, place.start + i) for i, m in enumerate(ask.messages[place.start :])]
            try:
                delta = self._renderer.follow_up(
                    lambda: [template_form(m, i) for i, m in enumerate(ask.messages[: place.start - 1])],
                    template_form(node.reply, place.start - 1),
                    new,
                    ask.tools,
                    options,
                    int(output[-1]) if len(output) else None,
                )
            except Unrenderable as error:
                why = f"template: {error}"
            else:
                self._delivered(session, place.parent)  # who quotes a reply has it
                return place, delta, None
        forms = [template_form(message, index) for index, message in enumerate(ask.messages)]
        whole = place._replace(parent=None, start=0)
        ids = self._renderer.root(forms, ask.tools, options)
        if session.tree.nodes:
            self._metrics.rerendered_tokens += len(ids)
        return whole, ids, why

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
            call.refusal = call.refusal or engine_failure("the call was abandoned")
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
            call.task.cancel()

    def deliver(self, session: Session, call: Call) -> None:
        """The reply goes out now, to a client that is still there: nothing may be awaited before that."""
        session.calls.delivered(call)
        assert call.node is not None, "only a reply that is there is delivered"
        self._delivered(session, call.node.turn.index)
        session.gave_up = session.interrupted = None

    def sent(self, session: Session, call: Call) -> None:
        """The whole reply went out."""
        assert call.node is not None, "only a reply that is there is sent"
        self._journal.sent(session, call.node.turn.index)

    def _delivered(self, session: Session, index: int) -> None:
        if not session.tree.nodes[index].turn.delivered:
            self._metrics.undelivered_turns -= 1
            session.tree.delivered(index)


def model_context(model: Path) -> int | None:
    """The model's own longest context, for engines that don't tell theirs."""
    path = model / "config.json"
    if not path.is_file():
        return None
    value = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if isinstance(value, int) else None
