"""Builds prompts: the tokens that a request adds to its session's tree, and its engine request."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest
from tidegate.gateway.errors import context_exceeded, unsupported
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.parsing.reply import (
    THOUGHT_END,
    THOUGHT_START,
    PlainParser,
    ReplyParser,
    ReplyReader,
    stop_search,
)
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat, forced_start, single_call_stop
from tidegate.gateway.rendering.messages import template_form
from tidegate.gateway.rendering.renderer import LargeText, Renderer, Unrenderable
from tidegate.gateway.rendering.token_bound import TokenBound
from tidegate.gateway.sampling import (
    RequestedSampling,
    SamplingRules,
    StructuredOutput,
    narrows,
    token_budget,
)
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest, count_read_ids
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.tree import Attachment, TurnNode, prefix_mismatch
from tidegate.gateway.turns.raw_prompts import attach_raw, raw_ids
from tidegate.turn import Ids
from tidegate.types import Message

log = logging.getLogger("tidegate.gateway")
_INLINE = 4096
"""Most characters that are encoded on the event loop, which takes a few milliseconds."""


Rendered = tuple[Attachment | None, Ids]
"""The position of a request in the tree, None for a raw prompt (its ids determine it), and its new ids."""


class PolicyRoute(NamedTuple):
    """A policy, by default the only one, which has no name."""

    name: str = ""
    engines: str = ""
    """`EngineEndpoint.policy` of its engines: its name, or that of another policy which shares them."""
    adapter: bool = False
    """Whether they serve it as the LoRA adapter of its name."""
    exempt: str | None = None
    """Why its turns are not trained on; None if they are."""


ONLY = PolicyRoute()


class PromptBuilder:
    """Attaches requests to their session's tree and renders the messages that they add. Raises ApiError."""

    def __init__(
        self,
        renderer: Renderer,
        pool: EnginePool,
        metrics: GatewayMetrics,
        tool_format: ToolCallFormat,
        model_context: int | None,
        structured_output: StructuredOutput = "text",
        policy: PolicyRoute = ONLY,
    ) -> None:
        self.policy = policy
        self._renderer = renderer
        self._pool = pool
        self._metrics = metrics
        self._tool_format = tool_format
        self._model_context = model_context
        self._sampling_rules = SamplingRules(
            renderer.stop_ids, structured_output, metrics.overridden_parameters
        )
        self._bound = TokenBound(renderer)
        # A marker that is a single token means that the model was trained to reason with it.
        marker = renderer.encode(THOUGHT_END)
        self.thought_end = marker[0] if len(marker) == 1 else None
        # Cached, as prompts have few distinct endings.
        self._opens_thought = lru_cache(1024)(
            lambda last: renderer.decode(last).rstrip().endswith(THOUGHT_START)
        )

    @property
    def context(self) -> int | None:
        """Size of the model's context in tokens, if known."""
        return self._pool.max_context(self.policy.engines) or self._model_context

    def check_fits(self, session: GatewaySession | None, request: TurnRequest) -> None:
        """Raises ApiError if a lower bound on the prompt's tokens exceeds the context, without encoding it.
        The overflow is noted in `session`."""
        text = request.prompt if isinstance(request.prompt, str) else None
        least = self._bound.min_tokens(request.messages, text)
        if isinstance(request.prompt, list):
            least = len(request.prompt)
        if self.context is not None and least >= self.context:
            if session is not None:
                self._record_overflow(session, least)
            raise context_exceeded(least, self.context, at_least=True)

    def _record_overflow(self, session: GatewaySession, tokens: int) -> None:
        if session.tree.newest() is not None:
            session.context_overflow = f"the model's context is full ({tokens} of {self.context} tokens)"

    def attach(self, session: GatewaySession, request: TurnRequest, record: bool = True) -> Attachment | None:
        """Attaches a request's messages to its session's tree, on the event loop; without `record`, the
        session is only read. Returns None for a raw prompt, which `prepare` attaches by its ids."""
        if request.prompt is not None:
            return None
        tools, options = request.tools, self._renderer.used_options(request.template_options)

        def render_alike(recorded: list[Message], sent: list[Message]) -> bool:
            return self._renderer.renders_alike(recorded, sent, tools, options)

        attachment = session.tree.attach(
            request.messages, tools, options, render_alike, record, self.policy.name
        )
        if attachment.quoted_ids is not None:
            if not record:  # the turn cannot be split, so the complete history is rendered
                return attachment._replace(parent=None, start=0)
            return self._split_at_quote(session, request, attachment)
        nodes = session.tree.nodes
        if (
            request.parent is None
            or attachment.parent is None
            or nodes[attachment.parent].reply_hash != nodes[request.parent].reply_hash
        ):
            return attachment
        return attachment._replace(parent=request.parent)

    def render(
        self,
        session: GatewaySession,
        request: TurnRequest,
        attachment: Attachment | None,
        inline: bool = False,
    ) -> Rendered:
        """Renders the ids that a request adds to its session's tree. Thread-safe: the session is only read.
        Raises ApiError, and LargeText if `inline` (on the event loop) and a long text must be encoded."""
        max_chars = _INLINE if inline else None
        if attachment is None:
            assert request.prompt is not None, "a request with messages is attached"
            return self._render_raw(session, request.prompt, max_chars)
        return self._render_messages(session, self._without_unread_options(request), attachment, max_chars)

    def prepare(
        self, session: GatewaySession, request: TurnRequest, rendered: Rendered, remaining_tokens: int | None
    ) -> ModelCall:
        """Creates a call that may sample up to `remaining_tokens` of the session's budget."""
        request = self._without_unread_options(request)
        attachment, delta = self._accept(session, rendered)
        if request.prompt is not None:
            request = replace(
                request, messages=[{"role": "user", "content": self._renderer.decode(delta.tolist())}]
            )
        new_reader = partial(self._reader, request, delta)
        reader = new_reader()
        if reader.prefill:
            # Its markers are tokens; the name of the tool is text.
            prefill = self._renderer.codec.escape_special_tokens(reader.prefill, sampled=True)
            delta = np.concatenate((delta, np.asarray(self._renderer.encode(prefill), np.int32)))
        prompt = session.tree.prompt(attachment.parent, delta)
        if attachment.parent is not None and prefix_mismatch(
            prompt, session.tree.nodes[attachment.parent].turn, len(delta)
        ):
            reason = f"drift: the prompt does not start with what turn {attachment.parent} recorded"
            log.error("session %s: %s; it is recorded as a branch", session.id, reason)
            self._metrics.drifted_turns += 1
            attachment, delta = attachment._replace(parent=None, start=0, branch_reason=reason), prompt
        if self.context is not None and len(prompt) >= self.context:
            self._record_overflow(session, len(prompt))
            session.tree.forget_request()
        budget = token_budget(
            len(prompt), request.sampling.max_tokens, session.sampling, self.context, remaining_tokens
        )
        engine_request = self._engine_request(session, request, reader.thought, prompt, budget)
        if session.sampling.routed_experts:  # of exempt calls, too, which may be context
            engine_request.experts_start = max(0, len(prompt) - len(delta) - 1)
        self._metrics.rendered_tokens += len(delta)
        return ModelCall(
            request,
            attachment,
            delta,
            request.messages[attachment.start :],
            engine_request,
            reader,
            structured=self._sampling_rules.structured(request.sampling, session.split),
            ordinal=session.calls.started_calls,
            prompt_tokens=len(prompt),
            new_reader=new_reader,
        )

    def _engine_request(
        self, session: GatewaySession, request: TurnRequest, thought: bool | None, prompt: Ids, budget: int
    ) -> GenerateRequest:
        rules, number = self._sampling_rules, session.calls.started_calls
        params = rules.params(
            request.sampling, session.sampling, session.env, session.split, session.seed, number
        )
        if request.tools and (end := single_call_stop(self._tool_format, request.tool_use)):
            params["stop"] = [*request.sampling.stop, end]
        requested_as = rules.requested_params(
            request.sampling, session.split, narrowed_by_agents=session.sampling.narrowed_by_agents
        )
        engine_request = GenerateRequest(
            prompt, params, budget, stream=request.stream, requested_as=requested_as
        )
        if self.policy.adapter:
            engine_request.adapter = self.policy.name
        if request.exempt is None:
            engine_request.top_logprobs = session.sampling.top_logprobs
            engine_request.sampling_mask = session.split == "train" and narrows(params)
        if stops := params.get("stop"):
            decode = self._renderer.decode
            engine_request.new_stop_search = lambda: stop_search(
                lambda: ReplyReader(decode, stops, PlainParser(), thought=thought)
            )
            if thought is not None:  # an engine would stop within the reasoning, too
                del params["stop"]
        return engine_request

    def _accept(self, session: GatewaySession, rendered: Rendered) -> tuple[Attachment, Ids]:
        """Attaches a raw prompt, counts a branch's tokens and marks the parent's reply as received."""
        attachment, delta = rendered
        if attachment is None:
            attachment, delta = self._attach_raw(session, delta)
        elif attachment.parent is None and session.tree.nodes:
            self._metrics.rerendered_tokens += len(delta)
        if attachment.parent is not None:
            session.tree.nodes[attachment.parent].quoted = True  # the client received its reply
            mark_delivered(session, attachment.parent, self._metrics)
        return attachment, delta

    def recorded_call(self, request: TurnRequest, node: TurnNode) -> ModelCall:
        """Creates a call for a repeated request whose turn `node` is already recorded."""
        delta = node.turn.delta_ids
        attachment = Attachment(node.turn.parent, 0, node.history_hash, None, node.tools_hash)
        engine_request = GenerateRequest(delta[:0], {}, 0, stream=request.stream)
        new_reader = partial(self._reader, request, delta)
        return ModelCall(
            request,
            attachment,
            delta,
            node.new_messages,
            engine_request,
            new_reader(),
            ordinal=node.request.ordinal,
            id=node.request.id,
            created=int(node.turn.started),
            new_reader=new_reader,
        )

    def _without_unread_options(self, request: TurnRequest) -> TurnRequest:
        options = self._renderer.used_options(request.template_options)
        # Usually all are read, and a copy of a frozen dataclass costs a hundredth of a turn.
        return request if options == request.template_options else replace(request, template_options=options)

    def _split_at_quote(
        self, session: GatewaySession, request: TurnRequest, attachment: Attachment
    ) -> Attachment:
        """Truncates the parent at the end of the text that the request quotes."""
        assert attachment.parent is not None, "a turn is quoted"
        node = session.tree.nodes[attachment.parent]
        quoted = template_form(request.messages[attachment.start - 1], attachment.start - 1)
        reply: Message = {"role": "assistant", "content": quoted["content"].rstrip()}
        if calls := quoted.get("tool_calls"):
            reply["tool_calls"] = node.reply["tool_calls"][: len(calls)]
        reader = partial(self._reader, replace(request, sampling=RequestedSampling()), node.turn.delta_ids)
        ids = node.turn.output_ids.tolist()
        return self._split(session, attachment, count_read_ids(reader, ids, reply) or len(ids), reply)

    @staticmethod
    def _split(session: GatewaySession, attachment: Attachment, count: int, reply: Message) -> Attachment:
        assert attachment.parent is not None, "a turn is quoted"
        changed = session.tree.split(attachment.parent, count, reply)
        session.unpersisted |= {node.turn.index: node for node in changed}
        if len(changed) == 1:
            return attachment
        return attachment._replace(
            branch_reason=f"closed: turn {attachment.parent} is continued from where it is quoted"
        )

    def _render_messages(
        self, session: GatewaySession, request: TurnRequest, attachment: Attachment, max_chars: int | None
    ) -> Rendered:
        """Renders the ids that a request adds to its parent, or a new root if the template prevents that."""
        tools, options, start = request.tools, request.template_options, attachment.start

        def forms(first: int, end: int | None = None) -> list[Message]:
            return [
                template_form(message, first + i) for i, message in enumerate(request.messages[first:end])
            ]

        if attachment.parent is not None:
            node = session.tree.nodes[attachment.parent]
            output = node.turn.output_ids
            last_id = int(output[-1]) if len(output) else None
            reply = template_form(node.reply, start - 1)
            try:
                delta = self._renderer.encode_suffix(
                    lambda: forms(0, start - 1), reply, forms(start), tools, options, last_id, max_chars
                )
            except Unrenderable as error:
                attachment = attachment._replace(branch_reason=f"template: {error}")
            else:
                return attachment, delta
        root = attachment._replace(parent=None, start=0)
        return root, self._renderer.encode_prompt(forms(0), tools, options, max_chars)

    def _render_raw(
        self, session: GatewaySession, prompt: str | list[int], max_chars: int | None
    ) -> Rendered:
        if max_chars is not None and len(prompt) > max_chars:
            raise LargeText
        ids = self._renderer.encode(prompt) if isinstance(prompt, str) else prompt
        if self.context is not None and len(ids) >= self.context:
            self._record_overflow(session, len(ids))
            raise context_exceeded(len(ids), self.context)
        return None, raw_ids(ids, self._renderer.codec.vocabulary)

    def _attach_raw(self, session: GatewaySession, prompt: Ids) -> tuple[Attachment, Ids]:
        attachment, delta = attach_raw(session.tree, prompt, self.policy.name)
        count, parent = attachment.quoted_ids, attachment.parent
        if count is not None and parent is not None:
            text = self._renderer.decode(session.tree.nodes[parent].turn.output_ids[:count].tolist())
            attachment = self._split(session, attachment, count, {"role": "assistant", "content": text})
        return attachment, delta

    def _reader(self, request: TurnRequest, delta: Ids) -> ReplyReader:
        if request.prompt is not None:
            return ReplyReader(self._renderer.decode, request.sampling.stop, PlainParser())
        calls = bool(request.tools) and request.tool_use.mode != "none"
        parser: ReplyParser = self._tool_format.parser(request.tools or ()) if calls else PlainParser()
        forced, thought = forced_start(self._tool_format, request.tool_use), self._thought(delta)
        if thought and forced:
            raise unsupported(
                "tool_choice", "a call cannot be forced when the prompt opens a reasoning section"
            )
        return ReplyReader(self._renderer.decode, request.sampling.stop, parser, forced, thought)

    def _thought(self, delta: Ids) -> bool | None:
        """Returns whether a prompt that ends with `delta` opens a reasoning section; None if the model does
        not reason."""
        return None if self.thought_end is None else self._opens_thought(tuple(delta[-4:].tolist()))


def mark_delivered(session: GatewaySession, index: int, metrics: GatewayMetrics) -> None:
    """Marks the reply of a turn as received by the client."""
    if not session.tree.nodes[index].turn.delivered:
        metrics.undelivered_turns -= 1
        session.tree.mark_delivered(index)


def model_context(model: Path) -> int | None:
    """Reads the model's context size in tokens, for engines that do not report theirs."""
    path = model / "config.json"
    if not path.is_file():
        return None
    value = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    return value if isinstance(value, int) else None
