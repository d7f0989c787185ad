"""Prompts: which tokens a request adds to its session's tree, and the call that samples the reply."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from tidegate.gateway.ask import Ask
from tidegate.gateway.calls import Call
from tidegate.gateway.drift import drifts
from tidegate.gateway.formats.base import Form, forced_start, single_call_stop
from tidegate.gateway.messages import template_form
from tidegate.gateway.metrics import Metrics
from tidegate.gateway.pool import EnginePool
from tidegate.gateway.protocol import Order
from tidegate.gateway.raw import place_raw, raw_ids
from tidegate.gateway.reasoning import CLOSE as THOUGHT_END
from tidegate.gateway.reasoning import OPEN as THOUGHT_START
from tidegate.gateway.reasoning import ReasoningParser
from tidegate.gateway.refusal import unsupported
from tidegate.gateway.render import Renderer, Unrenderable
from tidegate.gateway.reply import ReplyReader, stop_after
from tidegate.gateway.sampling import SamplingRules, token_budget
from tidegate.gateway.sessions import Session
from tidegate.gateway.toolcalls import Parser, PlainParser
from tidegate.gateway.tree import Node, Place
from tidegate.types import Ids

log = logging.getLogger("tidegate.gateway")


class Prompts:
    """Places requests in their session's tree and renders what they add to it. Raises Refusal.

    `delivered` is told of every turn that a request quotes: its client has it.
    """

    def __init__(
        self,
        renderer: Renderer,
        pool: EnginePool,
        metrics: Metrics,
        form: Form,
        model_context: int | None,
        delivered: Callable[[Session, int], None],
    ) -> None:
        self._renderer = renderer
        self._pool = pool
        self._metrics = metrics
        self._form = form
        self._model_context = model_context
        self._delivered = delivered
        self._sampling = SamplingRules(renderer.stop_ids)
        # Where the marker is a token of the model's own, the model was made to reason with it.
        marker = renderer.encode(THOUGHT_END)
        self.thought_end = marker[0] if len(marker) == 1 else None
        # Prompts end in few ways; what a prompt ends with is asked once for each.
        self._opens_thought = lru_cache(1024)(self._ends_with_thought)

    def prepare(self, session: Session, ask: Ask, left: int | None) -> Call:
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
        if context is not None and len(prompt) >= context and session.tree.newest() is not None:
            session.overflowed = f"the model's context is full ({len(prompt)} of {context} tokens)"
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

    def count(self, session: Session, ask: Ask) -> int:
        """How many tokens the prompt of a request has. Raises Refusal."""
        place = self._place(session, ask)
        place, delta, _ = self._delta(session, ask, place)
        return len(session.tree.prompt(place.parent, delta))

    def recall(self, ask: Ask, node: Node) -> Call:
        """A call whose reply is there already: the same request, whose turn is `node`, came again."""
        delta = node.turn.delta_ids
        place = Place(node.turn.parent, 0, node.asked, None, node.root)
        order = Order(delta[:0], {}, 0, ask.stream)
        call = Call(ask.digest, place, delta, node.said, order, self._reader(ask, delta))
        call.id, call.created = node.request.id, int(node.turn.started)
        call.idempotency_key, call.ordinal = node.request.idempotency_key, node.request.ordinal
        return call

    def _place(self, session: Session, ask: Ask) -> Place:
        place = session.tree.place(ask.messages, ask.tools, ask.template_options)
        nodes = session.tree.nodes
        if ask.parent is None or place.parent is None or nodes[place.parent].key != nodes[ask.parent].key:
            return place
        return place._replace(parent=ask.parent)

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

    def _raw(self, session: Session, prompt: str | list[int]) -> tuple[Place, Ids]:
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else prompt
        place, delta = place_raw(session.tree, raw_ids(ids, self._renderer.codec.vocabulary))
        if place.parent is not None:
            self._delivered(session, place.parent)  # who quotes a reply has it
        return place, delta

    def _ends_with_thought(self, last: tuple[int, ...]) -> bool:
        return self._renderer.decode(last).rstrip().endswith(THOUGHT_START)

    def _reader(self, ask: Ask, delta: Ids) -> ReplyReader:
        """What reads the reply to a prompt that ends with `delta`."""
        if ask.prompt is not None:
            return ReplyReader(self._renderer.decode, ask.wishes.stop, PlainParser())
        calls = bool(ask.tools) and ask.tool_use.mode != "none"
        parser: Parser = self._form.parser(ask.tools or ()) if calls else PlainParser()
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
