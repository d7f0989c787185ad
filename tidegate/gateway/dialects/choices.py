"""Requests for several choices, and their replies and streams: Chat Completions and Completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import orjson

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage, finish_reason
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.parts import Part
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sessions.model_calls import ModelCall

MAX_CHOICES = 128
READ = frozenset(
    {
        "n",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "logprobs",
    }
    | fields.PENALTIES.keys()
)
"""Fields that both dialects read."""


def read_n(payload: dict[str, Any]) -> int:
    n = fields.at_least_1(payload, "n") or 1
    if n > MAX_CHOICES:
        raise ApiError(f"n must be at most {MAX_CHOICES}", param="n")
    return n


def choices_of(turn_request: TurnRequest, n: int) -> list[TurnRequest]:
    """Returns `n` requests for the same prompt, with distinct seeds if the request has a seed."""
    sampling = turn_request.sampling
    if n == 1 or sampling.seed is None:
        return [turn_request] * n
    seeds = range(sampling.seed, sampling.seed + n)
    return [replace(turn_request, sampling=replace(sampling, seed=seed)) for seed in seeds]


@dataclass(frozen=True, slots=True)
class ChoicesRequest(ABC):
    """A parsed request for `choices` replies to each of its prompts, and the format of its response."""

    turn_requests: Sequence[TurnRequest]
    choices: int
    logprobs: bool
    stream: bool
    include_usage: bool

    id_prefix: ClassVar[str]
    kind: ClassVar[str]

    @classmethod
    def of(
        cls, payload: dict[str, Any], turn_requests: Sequence[TurnRequest], n: int, logprobs: bool
    ) -> Self:
        options = fields.get(payload, "stream_options", dict) or {}
        return cls(turn_requests, n, logprobs, fields.stream(payload), bool(options.get("include_usage")))

    @abstractmethod
    def content(self, call: ModelCall) -> dict[str, Any]:
        """Returns the fields of a choice that hold its reply."""

    @abstractmethod
    def logprobs_of(self, call: ModelCall, model: ServedModel) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> ChoiceEvents: ...

    def body(self, calls: Sequence[ModelCall], model: ServedModel) -> bytes:
        choices = [self.choice(index, call, self.content(call), model) for index, call in enumerate(calls)]
        head = self.head(calls, model, self.kind)
        return orjson.dumps({**head, "choices": choices, "usage": self.usage(calls, model)})

    def choice(
        self, index: int, call: ModelCall, content: dict[str, Any], model: ServedModel
    ) -> dict[str, Any]:
        """Returns a choice whose reply is complete."""
        logprobs = self.logprobs_of(call, model) if self.logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(call)}

    def head(self, calls: Sequence[ModelCall], model: ServedModel, kind: str) -> dict[str, Any]:
        key = f"{self.id_prefix}-{calls[0].id}"
        return {"id": key, "object": kind, "created": calls[0].created, "model": model.name}

    def usage(self, calls: Sequence[ModelCall], model: ServedModel) -> dict[str, Any]:
        usage = Usage.of(calls, model, self.choices)
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.output,
            "total_tokens": usage.prompt + usage.output,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }


class ChoiceEvents(ABC):
    """Formats the parts of calls as server-sent events."""

    ping = fields.PING

    def __init__(
        self,
        request: ChoicesRequest,
        calls: Sequence[ModelCall],
        model: ServedModel,
        kind: str,
        last: dict[str, Any],
    ) -> None:
        self._request = request
        self._calls = calls
        self._model = model
        self._head = request.head(calls, model, kind)
        self._last = last
        """Content of the last chunk of each choice, which has no text."""

    def start(self) -> bytes:
        return b""

    @abstractmethod
    def part(self, choice: int, part: Part) -> bytes: ...

    def end(self) -> bytes:
        # Engines report logprobs at the end, when all tokens and parts exist.
        data = b"".join(
            self._event(self._request.choice(index, call, self._last, self._model))
            for index, call in enumerate(self._calls)
        )
        if self._request.include_usage:
            usage = self._request.usage(self._calls, self._model)
            data += fields.event({**self._head, "choices": [], "usage": usage})
        return data + fields.framed(b"[DONE]")

    def error(self, refusal: ApiError) -> bytes:
        return fields.framed(fields.openai_error(refusal))

    def _chunk(self, choice: int, content: dict[str, Any]) -> bytes:
        return self._event({"index": choice, **content, "logprobs": None, "finish_reason": None})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return fields.event({**self._head, "choices": [choice]})
