"""Dialect of OpenAI's Chat Completions: requests, replies, streams and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tidegate.gateway.dialects import fields
from tidegate.gateway.dialects.base import ServedModel, Usage
from tidegate.gateway.dialects.fields import event, get
from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.parts import Part, Reasoning, ToolUse
from tidegate.gateway.parsing.reply import UNFINISHED, call_wire
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.pending_turns import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession

error = fields.openai_error
MAX_CHOICES = 128
# Accepted without effect on sampling.
_HARMLESS = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
# Parameters that other functions of this file read.
_READ = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "n"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs"}
    | {"chat_template_kwargs", "response_format", "reasoning_effort"}
    | fields.PENALTIES.keys()
)
# The only supported values besides null.
_ONLY: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "verbosity": fields.VERBOSITIES,
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed request and the format of its reply."""

    turn_requests: Sequence[TurnRequest]
    stream: bool
    logprobs: bool
    include_usage: bool

    def body(self, calls: Sequence[PendingTurn], model: ServedModel) -> bytes:
        choices = [
            {
                "index": index,
                "message": {**_reply(call), "refusal": None},
                "logprobs": logprobs(call, model) if self.logprobs else None,
                "finish_reason": finish_reason(call),
            }
            for index, call in enumerate(calls)
        ]
        usage = usage_row(Usage.of(calls, model, len(calls)))
        return orjson.dumps({**_head(calls, model, "chat.completion"), "choices": choices, "usage": usage})

    def events(self, calls: Sequence[PendingTurn], model: ServedModel) -> ChatEvents:
        return ChatEvents(calls, self, model)


def read(payload: dict[str, Any], session: GatewaySession) -> ChatRequest:
    """Parses a body. Raises ApiError that names an unsupported parameter or content."""
    fields.refuse_others(payload, _READ | _HARMLESS, _ONLY)
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: a list with at least one message is required", param="messages")
    stream = get(payload, "stream", bool) or False
    tools = _tools(payload)
    turn_request = TurnRequest(
        messages=messages,
        sampling=_sampling(payload),
        tools=tools,
        tool_use=_tool_use(payload, tools or []),
        template_options=_template_options(payload),
        stream=stream,
    )
    options = get(payload, "stream_options", dict) or {}
    turn_requests = choices_of(turn_request, read_n(payload))
    logprobs = get(payload, "logprobs", bool) or False
    return ChatRequest(turn_requests, stream, logprobs, bool(options.get("include_usage")))


def read_n(payload: dict[str, Any]) -> int:
    n = fields.at_least_1(payload, "n") or 1
    if n > MAX_CHOICES:
        raise ApiError(f"n must be at most {MAX_CHOICES}", param="n")
    return n


def choices_of(turn_request: TurnRequest, n: int) -> list[TurnRequest]:
    """Returns `n` requests for the same prompt, with distinct seeds if the request has a seed."""
    seed = turn_request.sampling.seed
    if n == 1 or seed is None:
        return [turn_request] * n
    return [
        replace(turn_request, sampling=replace(turn_request.sampling, seed=seed + index))
        for index in range(n)
    ]


def _sampling(payload: dict[str, Any]) -> RequestedSampling:
    form = get(payload, "response_format", dict) or {"type": "text"}
    return RequestedSampling(
        temperature=fields.within(payload, "temperature", 0, 2),
        top_p=fields.top_p(payload),
        top_k=get(payload, "top_k", int),
        max_tokens=fields.at_least_1(payload, "max_completion_tokens")
        or fields.at_least_1(payload, "max_tokens"),
        seed=get(payload, "seed", int),
        stop=fields.stops(payload, "stop"),
        penalties=fields.penalties(payload),
        schema=fields.schema(form, get(form, "json_schema", dict) or {}, "response_format"),
    )


def _tools(payload: dict[str, Any]) -> list[Any] | None:
    tools: list[Any] = get(payload, "tools", list) or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise unsupported(f"tools[{index}]", "only function tools with a name are supported")
    return tools or None


def _tool_use(payload: dict[str, Any], tools: list[Any]) -> ToolUse:
    """Reads `tool_choice`; `none` keeps the tools in the prompt but parses no calls."""
    choice = payload.get("tool_choice") or "auto"
    parallel = get(payload, "parallel_tool_calls", bool) is not False
    if choice in ("auto", "none"):
        return ToolUse("none" if choice == "none" else "auto", parallel=parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return fields.required_tool(choice, name, [tool["function"]["name"] for tool in tools], parallel)


def _template_options(payload: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = get(payload, "chat_template_kwargs", dict) or {}
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & options.keys()
    if reserved or not all(isinstance(v, str | int | float | bool | None) for v in options.values()):
        raise unsupported(
            "chat_template_kwargs", "only scalar values of options that the template defines are supported"
        )
    return fields.effort_options(payload.get("reasoning_effort"), "reasoning_effort") | options


# -- replies -----------------------------------------------------------------------------------------


def finish_reason(call: PendingTurn) -> str:
    assert call.node is not None, "the call is done"
    if call.node.turn.finish_reason == "length" and not call.reader.stopped:
        return "length"
    return "tool_calls" if call.node.reply.get("tool_calls") else "stop"


def _reply(call: PendingTurn) -> dict[str, Any]:
    assert call.node is not None, "the call is done"
    return call.node.reply


def _head(calls: Sequence[PendingTurn], model: ServedModel, kind: str) -> dict[str, Any]:
    first = calls[0]
    return {"id": f"chatcmpl-{first.id}", "object": kind, "created": first.created, "model": model.name}


def usage_row(usage: Usage) -> dict[str, Any]:
    """Formats usage for Chat Completions and Completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprobs(call: PendingTurn, model: ServedModel) -> dict[str, Any]:
    """Returns a reply's logprobs, including that of its end-of-turn token."""
    assert call.node is not None, "the call is done"
    turn = call.node.turn
    rows = []
    for token, logprob in zip(turn.output_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = model.token_text(token)
        # The bytes of a token that is a part of a character are unknown here.
        data = None if UNFINISHED in text else list(text.encode())
        rows.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return {"content": rows, "refusal": None}


class ChatEvents:
    """Formats the parts of calls as server-sent events."""

    ping = b": keep-alive\n\n"

    def __init__(self, calls: Sequence[PendingTurn], request: ChatRequest, model: ServedModel) -> None:
        self._calls = calls
        self._request = request
        self._model = model
        self._head = _head(calls, model, "chat.completion.chunk")
        self._called = [0] * len(calls)

    def start(self) -> bytes:
        return b"".join(
            self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(len(self._calls))
        )

    def part(self, choice: int, part: Part) -> bytes:
        if isinstance(part, str):
            return self._chunk(choice, {"content": part})
        if isinstance(part, Reasoning):
            return self._chunk(choice, {"reasoning_content": part.text})
        index = self._called[choice]
        self._called[choice] += 1
        key = self._calls[choice].reader.call_ids[index]
        named = {"index": index, **call_wire(key, part.name, "")}
        more = {"index": index, "function": {"arguments": part.arguments}}
        return self._chunk(choice, {"tool_calls": [named]}) + self._chunk(choice, {"tool_calls": [more]})

    def end(self) -> bytes:
        last = b"".join(
            self._chunk(
                choice,
                {},
                finish_reason(call),
                # Engines report logprobs at the end, when all tokens and parts exist.
                logprobs(call, self._model) if self._request.logprobs else None,
            )
            for choice, call in enumerate(self._calls)
        )
        if self._request.include_usage:
            usage = usage_row(Usage.of(self._calls, self._model, len(self._calls)))
            last += event({**self._head, "choices": [], "usage": usage})
        return last + b"data: [DONE]\n\n"

    def error(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def _chunk(
        self, choice: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> bytes:
        row = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [row]})


def models(name: str) -> bytes:
    """Returns the response body of `GET /models`."""
    return orjson.dumps({"object": "list", "data": [_model(name)]})


def model(name: str) -> bytes:
    """Returns the response body of `GET /models/{name}`."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tidegate"}
