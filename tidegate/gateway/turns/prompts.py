"""Prompts: which tokens a request adds to its session's tree, and the call that samples the reply."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest
from tidegate.gateway.errors import context_exceeded, unsupported
from tidegate.gateway.large_json import Folded
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.parsing.parts import PlainParser, ReplyParser
from tidegate.gateway.parsing.reasoning import CLOSE as THOUGHT_END
from tidegate.gateway.parsing.reasoning import OPEN as THOUGHT_START
from tidegate.gateway.parsing.reasoning import ReasoningParser
from tidegate.gateway.parsing.reply import ReplyReader, read_through, stop_after
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat, forced_start, single_call_stop
from tidegate.gateway.rendering.messages import template_form
from tidegate.gateway.rendering.renderer import LargeText, Renderer, Unrenderable
from tidegate.gateway.rendering.token_bound import TokenBound, weight
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sampling import RequestedSampling, SamplingRules, StructuredOutput, token_budget
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.tree import Attachment, TurnNode, prefix_mismatch
from tidegate.gateway.turns.raw_prompts import place_raw, raw_ids
from tidegate.types import Ids, Message

log = logging.getLogger("tidegate.gateway")
_INLINE = 4096
"""Characters that are encoded on the event loop: a few milliseconds."""


class Rendered(NamedTuple):
    """What a request adds, and where."""

    place: Attachment | None
    """None: it is found by the ids, which are the whole prompt."""
    delta: Ids
    branch: str | None = None
    """Why it could not extend the turn that it follows."""


class PromptBuilder:
    """Places requests in their session's tree and renders what they add to it. Raises Refusal.

    `quoted` is called for every turn that a request quotes: its client has the reply.
    """

    def __init__(
        self,
        renderer: Renderer,
        pool: EnginePool,
        metrics: GatewayMetrics,
        form: ToolCallFormat,
        model_context: int | None,
        quoted: Callable[[GatewaySession, int], None],
        structured_output: StructuredOutput = "text",
    ) -> None:
        self._renderer = renderer
        self._pool = pool
        self._metrics = metrics
        self._form = form
        self._model_context = model_context
        self._quoted = quoted
        self._sampling = SamplingRules(renderer.stop_ids, structured_output, metrics.overridden)
        self._bound = TokenBound(renderer)
        # Where the marker is a token of the model's own, the model was made to reason with it.
        marker = renderer.encode(THOUGHT_END)
        self.thought_end = marker[0] if len(marker) == 1 else None
        # Prompts end in few ways; what a prompt ends with is asked once for each.
        self._opens_thought = lru_cache(1024)(self._ends_with_thought)

    @property
    def context(self) -> int | None:
        """Tokens of the model's context, where it is known."""
        return self._pool.max_context or self._model_context

    def check_fits(self, session: GatewaySession | None, ask: TurnRequest, folded: Folded) -> None:
        """Raises Refusal for a prompt that certainly has more tokens than the context, without encoding it;
        `folded` has the long texts that the ask has marks for. The session, where there is one, has
        outgrown the context with it."""
        text = ask.prompt if isinstance(ask.prompt, str) else None
        least = self._bound.least(ask.messages, text, lambda one: folded.weigh(one, weight))
        if isinstance(ask.prompt, list):
            least = len(ask.prompt)
        if self.context is not None and least >= self.context:
            if session is not None:
                self._note_overflow(session, least)
            raise context_exceeded(least, self.context, at_least=True)

    def _note_overflow(self, session: GatewaySession, tokens: int) -> None:
        if session.tree.newest() is not None:
            session.overflowed = f"the model's context is full ({tokens} of {self.context} tokens)"

    def place(self, session: GatewaySession, ask: TurnRequest) -> Attachment | None:
        """Where a request of messages belongs in its session's tree, on the event loop; None for a prompt
        that comes as it is, which is placed by its ids."""
        return None if ask.prompt is not None else self._place(session, self._as_read(ask))

    def render(
        self, session: GatewaySession, ask: TurnRequest, place: Attachment | None, inline: bool = False
    ) -> Rendered:
        """What a request adds to its session's tree. Nothing of the session is changed: a thread may do it.

        Raises Refusal, and LargeText where a long text must be encoded `inline`, on the event loop.
        """
        most = _INLINE if inline else None
        if place is None:
            assert ask.prompt is not None, "a request of messages has a place"
            return self._raw(session, ask.prompt, most)
        return self._delta(session, self._as_read(ask), place, most)

    def prepare(
        self, session: GatewaySession, ask: TurnRequest, rendered: Rendered, left: int | None
    ) -> PendingTurn:
        """A new call, which may sample the `left` tokens of the session's budget."""
        ask = self._as_read(ask)
        place, delta, branch = self._taken(session, rendered)
        if ask.prompt is not None:
            ask = replace(ask, messages=[{"role": "user", "content": self._renderer.decode(delta.tolist())}])
        reread = partial(self._reader, ask, delta)
        reader = reread()
        if reader.begun:
            delta = np.concatenate((delta, np.asarray(self._renderer.encode(reader.begun), np.int32)))
        prompt = session.tree.prompt(place.parent, delta)
        if place.parent is not None and prefix_mismatch(
            prompt, session.tree.nodes[place.parent].turn, len(delta)
        ):
            branch = f"drift: the prompt does not start with what turn {place.parent} recorded"
            log.error("session %s: %s; it is recorded as a branch", session.id, branch)
            self._metrics.drifted_turns += 1
            place, delta = place._replace(parent=None, start=0), prompt
        if self.context is not None and len(prompt) >= self.context:
            self._note_overflow(session, len(prompt))
            session.tree.forget_request()
        budget = token_budget(len(prompt), ask.wishes.max_tokens, session.sampling, self.context, left)
        order = self._order(session, ask, prompt, budget)
        self._metrics.rendered_tokens += len(delta)
        return PendingTurn(
            ask.digest,
            place,
            delta,
            ask.messages[place.start :],
            order,
            reader,
            branch,
            ask.exempt,
            self._sampling.structured(ask.wishes, session.split),
            ask.idempotency_key,
            session.calls.begun,
            prompt_tokens=len(prompt),
            reread=reread,
        )

    def _order(self, session: GatewaySession, ask: TurnRequest, prompt: Ids, budget: int) -> GenerateRequest:
        params = self._sampling.params(
            ask.wishes, session.sampling, session.env, session.split, session.seed, session.calls.begun
        )
        if ask.tools and (end := single_call_stop(self._form, ask.tool_use)):
            params["stop"] = [*ask.wishes.stop, end]
        order = GenerateRequest(
            prompt, params, budget, ask.stream, self._sampling.asked(ask.wishes, session.split)
        )
        if stops := params.get("stop"):
            order.stop_after = partial(stop_after, self._renderer.decode, stops)
        return order

    def count(self, session: GatewaySession, rendered: Rendered) -> int:
        """How many tokens a prompt has."""
        place, delta, _ = self._taken(session, rendered)
        return len(session.tree.prompt(place.parent, delta))

    def _taken(self, session: GatewaySession, rendered: Rendered) -> tuple[Attachment, Ids, str | None]:
        """A rendered request counts, and with it what it says of earlier ones."""
        place, delta = rendered.place, rendered.delta
        if place is None:
            place, delta = self._placed_raw(session, delta)
        elif place.parent is None and session.tree.nodes:
            self._metrics.rerendered_tokens += len(delta)
        if place.parent is not None:
            self._quoted(session, place.parent)  # who quotes a reply has it
        return place, delta, rendered.branch

    def recall(self, ask: TurnRequest, node: TurnNode) -> PendingTurn:
        """A call whose reply is there already: the same request, whose turn is `node`, came again."""
        delta = node.turn.delta_ids
        place = Attachment(node.turn.parent, 0, node.asked, None, node.root)
        order = GenerateRequest(delta[:0], {}, 0, ask.stream)
        reread = partial(self._reader, ask, delta)
        call = PendingTurn(ask.digest, place, delta, node.said, order, reread(), reread=reread)
        call.id, call.created = node.request.id, int(node.turn.started)
        call.idempotency_key, call.ordinal = node.request.idempotency_key, node.request.ordinal
        return call

    def _as_read(self, ask: TurnRequest) -> TurnRequest:
        """The request without template options that the template does not read."""
        return replace(ask, template_options=self._renderer.options_read(ask.template_options))

    def _place(self, session: GatewaySession, ask: TurnRequest) -> Attachment:
        tools, options = ask.tools, ask.template_options

        def alike(one: list[Message], other: list[Message]) -> bool:
            return self._renderer.alike(one, other, tools, options)

        place = session.tree.place(ask.messages, tools, options, alike)
        if place.cut is not None:
            return self._ended_at_quote(session, ask, place)
        nodes = session.tree.nodes
        if ask.parent is None or place.parent is None or nodes[place.parent].key != nodes[ask.parent].key:
            return place
        return place._replace(parent=ask.parent)

    def _ended_at_quote(self, session: GatewaySession, ask: TurnRequest, place: Attachment) -> Attachment:
        """The same place, after its parent was made to end where the request quotes it."""
        assert place.parent is not None, "a turn is quoted"
        node = session.tree.nodes[place.parent]
        form = template_form(ask.messages[place.start - 1], place.start - 1)
        reply: Message = {"role": "assistant", "content": form["content"].rstrip()}
        if calls := form.get("tool_calls"):
            reply["tool_calls"] = node.reply["tool_calls"][: len(calls)]
        reader = partial(self._reader, replace(ask, wishes=RequestedSampling()), node.turn.delta_ids)
        ids = node.turn.output_ids.tolist()
        return self._split(session, place, read_through(reader, ids, reply) or len(ids), reply)

    @staticmethod
    def _split(session: GatewaySession, place: Attachment, count: int, reply: Message) -> Attachment:
        assert place.parent is not None, "a turn is quoted"
        changed = session.tree.split(place.parent, count, reply)
        session.unwritten |= {node.turn.index: node for node in changed}
        if len(changed) == 1:
            return place
        return place._replace(why=f"closed: turn {place.parent} is continued from where it is quoted")

    def _delta(
        self, session: GatewaySession, ask: TurnRequest, place: Attachment, most: int | None
    ) -> Rendered:
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
                    most,
                )
            except Unrenderable as error:
                why = f"template: {error}"
            else:
                return Rendered(place, delta)
        forms = [template_form(message, index) for index, message in enumerate(ask.messages)]
        whole = place._replace(parent=None, start=0)
        return Rendered(whole, self._renderer.root(forms, ask.tools, options, most), why)

    def _raw(self, session: GatewaySession, prompt: str | list[int], most: int | None) -> Rendered:
        if most is not None and len(prompt) > most:
            raise LargeText
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else prompt
        if self.context is not None and len(ids) >= self.context:
            self._note_overflow(session, len(ids))
            raise context_exceeded(len(ids), self.context)
        return Rendered(None, raw_ids(ids, self._renderer.codec.vocabulary))

    def _placed_raw(self, session: GatewaySession, prompt: Ids) -> tuple[Attachment, Ids]:
        place, delta = place_raw(session.tree, prompt)
        if place.cut is not None and place.parent is not None:
            quoted = session.tree.nodes[place.parent].turn.output_ids[: place.cut].tolist()
            reply: Message = {"role": "assistant", "content": self._renderer.decode(quoted)}
            place = self._split(session, place, place.cut, reply)
        return place, delta

    def _ends_with_thought(self, last: tuple[int, ...]) -> bool:
        return self._renderer.decode(last).rstrip().endswith(THOUGHT_START)

    def _reader(self, ask: TurnRequest, delta: Ids) -> ReplyReader:
        """What reads the reply to a prompt that ends with `delta`."""
        if ask.prompt is not None:
            return ReplyReader(self._renderer.decode, ask.wishes.stop, PlainParser())
        calls = bool(ask.tools) and ask.tool_use.mode != "none"
        parser: ReplyParser = self._form.parser(ask.tools or ()) if calls else PlainParser()
        forced = forced_start(self._form, ask.tool_use)
        if self.thought_end is not None:
            begun = self._opens_thought(tuple(delta[-4:].tolist()))
            if begun and forced:
                raise unsupported("tool_choice", "a call cannot be forced where the prompt opens reasoning")
            parser = ReasoningParser(parser, begun)
        return ReplyReader(self._renderer.decode, ask.wishes.stop, parser, forced)


def model_context(model: Path) -> int | None:
    """The model's own longest context, for engines that don't tell theirs."""
    path = model / "config.json"
    if not path.is_file():
        return None
    value = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if isinstance(value, int) else None
