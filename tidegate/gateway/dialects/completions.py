"""Dialect of OpenAI's Completions: prompts as text or ids, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel
from tidegate.gateway.dialects.chat import MAX_CHOICES, READ, ChoiceEvents, ChoicesRequest, choices_of, read_n
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import Part
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest
from tidegate.gateway.sessions.session import GatewaySession

error = fields.openai_error
_SUPPORTED = READ | fields.HARMLESS | {"prompt", "best_of"}
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",), "logit_bias": ({},)}


class CompletionsRequest(ChoicesRequest):
    """A parsed request for completions of one or several prompts."""

    __slots__ = ()
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    last: ClassVar = {"text": ""}

    def content(self, call: ModelCall) -> dict[str, Any]:
        return {"text": call.recorded.reply["content"]}

    def logprobs_of(self, call: ModelCall, model: ServedModel) -> dict[str, Any]:
        """Returns a reply's logprobs; offsets refer to the text of its tokens, including special tokens."""
        turn = call.recorded.turn
        tokens = [model.token_text(token) for token in turn.output_ids.tolist()]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=0))
        values = turn.logprobs.tolist()
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> CompletionEvents:
        return CompletionEvents(self, calls, model)


class CompletionEvents(ChoiceEvents):
    """Formats the parts of calls as server-sent events."""

    def part(self, choice: int, part: Part) -> bytes:
        assert isinstance(part, str), "completions have no other parts"
        return self._chunk(choice, {"text": part})


def read(payload: dict[str, Any], session: GatewaySession) -> CompletionsRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    n = read_n(payload)
    fields.refuse_others(payload, _SUPPORTED, _ONLY)
    if payload.get("best_of") not in (None, n):
        raise ApiError(f"best_of: only the value of n ({n}) is supported", param="best_of")
    logprobs = fields.get(payload, "logprobs", int)
    if logprobs not in (None, 0):
        raise ApiError("logprobs: only 0 (the logprobs of the sampled tokens) is supported", param="logprobs")
    prompts = _prompts(payload.get("prompt"))
    if n * len(prompts) > MAX_CHOICES:
        raise ApiError(f"n and prompt request more than {MAX_CHOICES} completions", param="prompt")
    sampling, stream = fields.sampling(payload, "max_tokens"), fields.stream(payload)
    turn_requests = [
        turn_request
        for prompt in prompts
        for turn_request in choices_of(TurnRequest([], sampling, prompt=prompt, stream=stream), n)
    ]
    return CompletionsRequest.of(payload, turn_requests, n, logprobs is not None)


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
