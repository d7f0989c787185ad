"""Dialect of OpenAI's Chat Completions: requests, replies, streams and errors.

Requests for several choices, and their replies and streams, are those of Completions, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import orjson

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage, finish_reason
from tidegate.gateway.dialects.fields import get
from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.reply import UNFINISHED, Part, Reasoning, ToolUse, call_wire
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest
from tidegate.gateway.sessions.session import GatewaySession

MAX_CHOICES = 128
READ = {
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
} | fields.PENALTIES.keys()
"""Fields that Completions reads, too."""
error = fields.openai_error
_SUPPORTED = (
    READ
    | {"messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens"}
    | {"chat_template_kwargs", "response_format", "reasoning_effort"}
    # Accepted without effect on sampling.
    | fields.HARMLESS
    | {"store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "verbosity": fields.VERBOSITIES,
}


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
    chunk_kind: ClassVar[str]
    last: ClassVar[dict[str, Any]]
    """Content of the last chunk of each choice, which has no text."""

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


class ChatRequest(ChoicesRequest):
    """A parsed request and the format of its reply."""

    __slots__ = ()
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    last: ClassVar = {"delta": {}}

    def content(self, call: ModelCall) -> dict[str, Any]:
        return {"message": {**call.recorded.reply, "refusal": None}}

    def logprobs_of(self, call: ModelCall, model: ServedModel) -> dict[str, Any]:
        """Returns a reply's logprobs, including that of its end-of-turn token."""
        turn = call.recorded.turn
        rows = []
        for token, logprob in zip(turn.output_ids.tolist(), turn.logprobs.tolist(), strict=True):
            text = model.token_text(token)
            # The bytes of a token that is a part of a character are unknown here.
            data = None if UNFINISHED in text else list(text.encode())
            rows.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
        return {"content": rows, "refusal": None}

    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> ChatEvents:
        return ChatEvents(self, calls, model)


def read(payload: dict[str, Any], session: GatewaySession) -> ChatRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    fields.refuse_others(payload, _SUPPORTED, _ONLY)
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: a list with at least one message is required", param="messages")
    tools = _tools(payload)
    turn_request = TurnRequest(
        messages=fields.complete_history(
            messages,
            "messages: an assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages",
            "messages",
        ),
        sampling=_sampling(payload),
        tools=tools,
        tool_use=_tool_use(payload, tools),
        template_options=_template_options(payload),
        stream=fields.stream(payload),
    )
    n = read_n(payload)
    return ChatRequest.of(payload, choices_of(turn_request, n), n, get(payload, "logprobs", bool) or False)


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


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    form = get(payload, "response_format", dict) or {"type": "text"}
    schema = fields.schema(form, get(form, "json_schema", dict) or {}, "response_format")
    return fields.sampling(payload, "max_completion_tokens", "max_tokens", schema=schema)


def _tools(payload: dict[str, Any]) -> list[Any] | None:
    tools: list[Any] = get(payload, "tools", list) or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise unsupported(f"tools[{index}]", "only function tools with a name are supported")
    return tools or None


def _tool_use(payload: dict[str, Any], tools: list[Any] | None) -> ToolUse:
    choice = payload.get("tool_choice") or "auto"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    parallel = get(payload, "parallel_tool_calls", bool) is not False
    return fields.tool_use(choice, name, tools, parallel)


def _template_options(payload: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = get(payload, "chat_template_kwargs", dict) or {}
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & options.keys()
    if reserved or not all(isinstance(v, str | int | float | bool | None) for v in options.values()):
        raise unsupported(
            "chat_template_kwargs", "only scalar values of options that the template defines are supported"
        )
    return fields.effort_options(payload.get("reasoning_effort"), "reasoning_effort") | options


class ChoiceEvents(ABC):
    """Formats the parts of calls as server-sent events."""

    ping = fields.PING

    def __init__(self, request: ChoicesRequest, calls: Sequence[ModelCall], model: ServedModel) -> None:
        self._request = request
        self._calls = calls
        self._model = model
        self._head = request.head(calls, model, request.chunk_kind)

    def start(self) -> bytes:
        return b""

    @abstractmethod
    def part(self, choice: int, part: Part) -> bytes: ...

    def end(self) -> bytes:
        # Engines report logprobs at the end, when all tokens and parts exist.
        data = b"".join(
            self._event(self._request.choice(index, call, self._request.last, self._model))
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


class ChatEvents(ChoiceEvents):
    """Formats the parts of calls as server-sent events."""

    def __init__(self, request: ChatRequest, calls: Sequence[ModelCall], model: ServedModel) -> None:
        super().__init__(request, calls, model)
        self._called = [0] * len(calls)

    def start(self) -> bytes:
        return b"".join(
            self._delta(choice, {"role": "assistant", "content": ""}) for choice in range(len(self._calls))
        )

    def part(self, choice: int, part: Part) -> bytes:
        if isinstance(part, str):
            return self._delta(choice, {"content": part})
        if isinstance(part, Reasoning):
            return self._delta(choice, {"reasoning_content": part.text})
        index = self._called[choice]
        self._called[choice] += 1
        key = self._calls[choice].reader.call_ids[index]
        named = {"index": index, **call_wire(key, part.name, "")}
        more = {"index": index, "function": {"arguments": part.arguments}}
        return self._delta(choice, {"tool_calls": [named]}) + self._delta(choice, {"tool_calls": [more]})

    def _delta(self, choice: int, delta: dict[str, Any]) -> bytes:
        return self._chunk(choice, {"delta": delta})


def models(names: Sequence[str], single: bool) -> bytes:
    """Returns the response body of `GET /models`, or of `GET /models/{name}` if `single`."""
    found = [{"id": name, "object": "model", "created": 0, "owned_by": "tidegate"} for name in names]
    return orjson.dumps(found[0] if single else {"object": "list", "data": found})
