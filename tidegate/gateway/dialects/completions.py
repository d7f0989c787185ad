"""Dialect of OpenAI's Completions: prompts as text or ids, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from tidegate.gateway.dialects import chat, fields
from tidegate.gateway.dialects.base import ServedModel, Usage
from tidegate.gateway.dialects.fields import event, get
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.parts import Part
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.pending_turns import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession

error = fields.openai_error
# Accepted without effect on sampling.
_HARMLESS = frozenset({"model", "user", "metadata", "service_tier"})
_READ = frozenset(
    {"prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options"}
    | {"n", "best_of", "logprobs"}
    | fields.PENALTIES.keys()
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "logit_bias": ({},)}


@dataclass(frozen=True, slots=True)
class CompletionsRequest:
    """A parsed request for `choices` completions of each of its prompts."""

    turn_requests: Sequence[TurnRequest]
    stream: bool
    choices: int
    logprobs: bool
    include_usage: bool

    def body(self, calls: Sequence[PendingTurn], model: ServedModel) -> bytes:
        rows = [
            {
                "index": index,
                "text": "" if call.node is None else call.node.reply["content"],
                "logprobs": _logprobs(call, model) if self.logprobs else None,
                "finish_reason": chat.finish_reason(call),
            }
            for index, call in enumerate(calls)
        ]
        usage = chat.usage_row(Usage.of(calls, model, self.choices))
        return orjson.dumps({**_head(calls, model), "choices": rows, "usage": usage})

    def events(self, calls: Sequence[PendingTurn], model: ServedModel) -> CompletionEvents:
        return CompletionEvents(calls, self, model)


def read(payload: dict[str, Any], session: GatewaySession) -> CompletionsRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    n = chat.read_n(payload)
    fields.refuse_others(payload, _READ | _HARMLESS, _ONLY)
    if payload.get("best_of") not in (None, n):
        raise ApiError(f"best_of: only the value of n ({n}) is supported", param="best_of")
    logprobs = get(payload, "logprobs", int)
    if logprobs not in (None, 0):
        raise ApiError("logprobs: only 0 (the logprobs of the sampled tokens) is supported", param="logprobs")
    prompts = _prompts(payload.get("prompt"))
    if n * len(prompts) > chat.MAX_CHOICES:
        raise ApiError(f"n and prompt request more than {chat.MAX_CHOICES} completions", param="prompt")
    stream = get(payload, "stream", bool) or False
    options = get(payload, "stream_options", dict) or {}
    sampling = _sampling(payload)
    turn_requests = [
        turn_request
        for prompt in prompts
        for turn_request in chat.choices_of(
            TurnRequest(messages=[], prompt=prompt, sampling=sampling, stream=stream), n
        )
    ]
    return CompletionsRequest(
        turn_requests, stream, n, logprobs is not None, bool(options.get("include_usage"))
    )


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    return RequestedSampling(
        temperature=fields.within(payload, "temperature", 0, 2),
        top_p=fields.top_p(payload),
        top_k=get(payload, "top_k", int),
        max_tokens=fields.at_least_1(payload, "max_tokens"),
        seed=get(payload, "seed", int),
        stop=fields.stops(payload, "stop"),
        penalties=fields.penalties(payload),
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Reads one or several prompts, each a text or a list of ids."""
    if _is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(map(_is_prompt, prompt)):
        return prompt
    raise ApiError("prompt: a text, a list of ids, or a list of either is required", param="prompt")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
    )


def _head(calls: Sequence[PendingTurn], model: ServedModel) -> dict[str, Any]:
    first = calls[0]
    kind = "text_completion"
    return {"id": f"cmpl-{first.id}", "object": kind, "created": first.created, "model": model.name}


def _logprobs(call: PendingTurn, model: ServedModel) -> dict[str, Any]:
    """Returns a reply's logprobs; offsets refer to the text of all its tokens, including special tokens."""
    assert call.node is not None, "the call is done"
    turn = call.node.turn
    tokens = [model.token_text(token) for token in turn.output_ids.tolist()]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=0))
    values = turn.logprobs.tolist()
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


class CompletionEvents:
    """Formats the parts of calls as server-sent events."""

    ping = b": keep-alive\n\n"

    def __init__(self, calls: Sequence[PendingTurn], request: CompletionsRequest, model: ServedModel) -> None:
        self._calls = calls
        self._request = request
        self._model = model
        self._head = _head(calls, model)

    def start(self) -> bytes:
        return b""

    def part(self, choice: int, part: Part) -> bytes:
        assert isinstance(part, str), "completions have no other parts"
        return self._chunk(choice, part)

    def end(self) -> bytes:
        last = b"".join(
            self._chunk(
                choice,
                "",
                chat.finish_reason(call),
                _logprobs(call, self._model) if self._request.logprobs else None,
            )
            for choice, call in enumerate(self._calls)
        )
        if self._request.include_usage:
            usage = chat.usage_row(Usage.of(self._calls, self._model, self._request.choices))
            last += event({**self._head, "choices": [], "usage": usage})
        return last + b"data: [DONE]\n\n"

    def error(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def _chunk(self, choice: int, text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        row = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [row]})
