"""OpenAI's Chat Completions: its requests, replies, streams and errors. Nothing else knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidegate.gateway.calls import Call
from tidegate.gateway.refusal import Refusal, unsupported
from tidegate.gateway.reply import call_wire
from tidegate.gateway.sampling import Wishes
from tidegate.gateway.toolcalls import Part
from tidegate.gateway.turns import Ask
from tidegate.types import Message

# Accepted, and without any effect on what is sampled.
_HARMLESS = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
# Parameters that are understood elsewhere in this file.
_READ = frozenset(
    {"messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
    | {"temperature", "top_p", "top_k", "seed", "stop", "logprobs", "chat_template_kwargs"}
)
# Penalties and their neutral values.
_PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0}
# The only values, besides null, that can be honoured.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, and what its reply must look like."""

    ask: Ask
    logprobs: bool = False
    include_usage: bool = False


def read_request(payload: Any, digest: bytes, idempotency_key: str | None, retry: bool) -> ChatRequest:
    """Translate a body; raises Refusal that names what cannot be honoured."""
    if not isinstance(payload, dict):
        raise Refusal("the body is not a JSON object")
    for name in payload.keys() - _READ - _HARMLESS:
        _check_other(name, payload[name])
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages: a list with at least one message is required", param="messages")
    stream = _get(payload, "stream", bool) or False
    logprobs = _get(payload, "logprobs", bool) or False
    if stream and logprobs:
        raise unsupported("logprobs", "are not supported in streams")
    ask = Ask(
        messages=messages,
        digest=digest,
        wishes=_wishes(payload),
        tools=_tools(payload),
        parse_tools=_tool_choice(payload) != "none",
        template_options=_template_options(payload),
        stream=stream,
        idempotency_key=idempotency_key,
        retry=retry,
    )
    options = _get(payload, "stream_options", dict) or {}
    return ChatRequest(ask, logprobs, bool(options.get("include_usage")))


def _check_other(name: str, value: Any) -> None:
    if value is None or name in _PENALTIES or value in _ONLY.get(name, ()):
        return
    if name in _ONLY:
        raise unsupported(name, f"{value!r} is not supported, only {_ONLY[name][0]!r}")
    raise unsupported(name, "this parameter is not supported")


def _wishes(payload: dict[str, Any]) -> Wishes:
    most = _get(payload, "max_completion_tokens", int)
    if most is None:
        most = _get(payload, "max_tokens", int)
    if most is not None and most < 1:
        raise Refusal("max_tokens must be at least 1", param="max_tokens")
    temperature = _get(payload, "temperature", float)
    if temperature is not None and not 0 <= temperature <= 2:
        raise Refusal("temperature must lie in 0..2", param="temperature")
    top_p = _get(payload, "top_p", float)
    if top_p is not None and not 0 < top_p <= 1:
        raise Refusal("top_p must lie in (0, 1]", param="top_p")
    penalties = {}
    for name, neutral in _PENALTIES.items():
        value = _get(payload, name, float)
        if value is not None and value != neutral:
            penalties[name] = value
    return Wishes(
        temperature, top_p, _get(payload, "top_k", int), most, _get(payload, "seed", int), _stops(payload),
        penalties,
    )  # fmt: skip


def _get(payload: dict[str, Any], name: str, kind: type) -> Any:
    value = payload.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise Refusal(f"{name} must be {_A[kind]}, not {value!r}"[:300], param=name)
    return value


_A = {int: "an integer", float: "a number", bool: "true or false", dict: "an object"}


def _stops(payload: dict[str, Any]) -> Sequence[str]:
    stop = payload.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise Refusal("stop must be a string or a list of strings, none of them empty", param="stop")
    return stops


def _tools(payload: dict[str, Any]) -> list[Any] | None:
    tools = payload.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refusal("tools must be a list", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise unsupported(f"tools[{index}]", "only function tools with a name are supported")
    return tools


def _tool_choice(payload: dict[str, Any]) -> str:
    """`none` leaves the tools in the prompt, so that it stays the same, and reads no calls."""
    choice = payload.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", f"{choice!r} is not supported, only 'auto' and 'none'")
    return str(choice)


def _template_options(payload: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = _get(payload, "chat_template_kwargs", dict) or {}
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & options.keys()
    if reserved or not all(isinstance(v, str | int | float | bool | None) for v in options.values()):
        raise unsupported("chat_template_kwargs", "only plain values that the template itself reads")
    return options


# -- replies -----------------------------------------------------------------------------------------


def whole(call: Call, request: ChatRequest, model: str, token_text: Callable[[int], str]) -> bytes:
    """The body of a reply that is not streamed."""
    assert call.node is not None, "the call is done"
    message: Message = {**call.node.reply, "refusal": None}
    logprobs = _logprobs(call, token_text) if request.logprobs else None
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(call),
    }
    return orjson.dumps({**_head(call, model, "chat.completion"), "choices": [choice], "usage": _usage(call)})


def finish_reason(call: Call) -> str:
    assert call.node is not None, "the call is done"
    if call.node.turn.finish_reason == "length" and not call.reader.stopped:
        return "length"
    return "tool_calls" if call.node.reply.get("tool_calls") else "stop"


def _head(call: Call, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": model}


def _usage(call: Call) -> dict[str, Any]:
    assert call.node is not None, "the call is done"
    output = len(call.node.turn.output_ids)
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": call.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": call.node.turn.cached_tokens},
    }


def _logprobs(call: Call, token_text: Callable[[int], str]) -> dict[str, Any]:
    assert call.node is not None, "the call is done"
    turn = call.node.turn
    rows = []
    for token, logprob in zip(turn.output_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = token_text(token)
        rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows, "refusal": None}


class ChatStream:
    """Turns a call's parts into server-sent events."""

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, call: Call, request: ChatRequest, model: str) -> None:
        self._call = call
        self._request = request
        self._head = _head(call, model, "chat.completion.chunk")
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def part(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._chunk({"content": part})
        index = self._calls
        self._calls += 1
        named = {"index": index, **call_wire(self._call.reader.call_ids[index], part.name, "")}
        more = {"index": index, "function": {"arguments": part.arguments}}
        return self._chunk({"tool_calls": [named]}) + self._chunk({"tool_calls": [more]})

    def end(self) -> bytes:
        last = self._chunk({}, finish_reason(self._call))
        if self._request.include_usage:
            last += _event({**self._head, "choices": [], "usage": _usage(self._call)})
        return last + b"data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + error_body(refusal) + b"\n\n"

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**self._head, "choices": [choice]})


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def error_body(refusal: Refusal) -> bytes:
    return orjson.dumps(
        {
            "error": {
                "message": str(refusal),
                "type": refusal.type,
                "param": refusal.param,
                "code": refusal.code,
            }
        }
    )
