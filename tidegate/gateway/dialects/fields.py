"""Reads and validates fields of request bodies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.reply import ToolUse
from tidegate.gateway.rendering.messages import in_call_order, unanswered_calls
from tidegate.gateway.sampling import RequestedSampling, Schema
from tidegate.service import exact
from tidegate.types import Message

_KINDS = {
    int: "an integer", float: "a number", bool: "true or false",
    str: "a string", dict: "an object", list: "a list",
}  # fmt: skip
HARMLESS = frozenset({"model", "user", "metadata", "service_tier"})
"""Fields of OpenAI's dialects that are accepted without effect."""
PING = b": keep-alive\n\n"
"""Keep-alive message of OpenAI's dialects."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
"""Accepted without effect: no template uses a verbosity."""
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0}
"""Penalties of OpenAI's dialects and their extensions, with their neutral values."""


def get(payload: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Returns a field's value, or None if it is absent or null. Raises ApiError for another type."""
    value = payload.get(name)
    if value is None:
        return None
    param = where + name
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ApiError(f"{param} must be a number of at most 64 bits, not {str(value)[:60]}", param=param)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ApiError(f"{param} must be {_KINDS[kind]}, not {value!r}"[:300], param=param)
    return value


def at_least_1(payload: Mapping[str, Any], name: str) -> int | None:
    value: int | None = get(payload, name, int)
    if value is not None and value < 1:
        raise ApiError(f"{name} must be at least 1", param=name)
    return value


def stream(payload: Mapping[str, Any]) -> bool:
    return get(payload, "stream", bool) or False


def refuse_others(
    payload: Mapping[str, Any], supported: Collection[str], only: Mapping[str, Sequence[Any]], where: str = ""
) -> None:
    """Raises ApiError for unknown fields; `only` lists the supported values, besides null, of some fields."""
    for name in payload.keys() - supported:
        value = payload[name]
        if value is None or value in only.get(name, ()):
            continue
        if name in only:
            allowed = " or ".join(map(repr, only[name]))
            raise unsupported(where + name, f"{value!r} is not supported, only {allowed}"[:300])
        # Not ignored: the client would take the reply for one under its parameter.
        raise unsupported(where + name, "this parameter is not supported")


def sampling(
    payload: Mapping[str, Any],
    *max_tokens: str,
    max_temperature: float = 2,
    stop: str = "stop",
    schema: Schema | None = None,
) -> RequestedSampling:
    """Reads the sampling parameters, the limit of tokens from the first given field of `max_tokens`.
    Parameters that a dialect lacks are absent, as `refuse_others` refuses them."""
    temperature, top_p = get(payload, "temperature", float), get(payload, "top_p", float)
    if temperature is not None and not 0 <= temperature <= max_temperature:
        raise ApiError(f"temperature must lie in 0..{max_temperature:g}", param="temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise ApiError("top_p must lie in (0, 1]", param="top_p")
    limits = (at_least_1(payload, name) for name in max_tokens)
    penalties = {name: get(payload, name, float) for name in PENALTIES}
    return RequestedSampling(
        temperature=temperature,
        top_p=top_p,
        top_k=get(payload, "top_k", int),
        max_tokens=next(filter(None, limits), None),
        seed=get(payload, "seed", int),
        stop=_stops(payload, stop),
        stop_param=stop,
        # A session may have a min-p of its own, which the agent's 0 switches off.
        penalties={
            n: v for n, v in penalties.items() if v is not None and (v != PENALTIES[n] or n == "min_p")
        },
        schema=schema,
    )


def _stops(payload: Mapping[str, Any], name: str) -> Sequence[str]:
    value = payload.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(stop, str) and stop for stop in values):
        raise ApiError(f"{name} must be a string or a list of strings, none of them empty", param=name)
    return values


def schema(form: Mapping[str, Any], holder: Mapping[str, Any], param: str) -> Schema | None:
    """Reads a reply format `{"type": …}` whose JSON schema is in `holder`; returns None for text."""
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return Schema(param, '{"type":"object"}')
        case "json_schema" if isinstance(holder.get("schema"), dict):
            return Schema(param, exact.dumps(holder["schema"]).decode())
        case other:
            raise unsupported(param, f"{other!r} is not supported or has no schema"[:300])


def effort_options(effort: Any, param: str) -> dict[str, Any]:
    """Returns the template options for a reasoning effort, which only the template uses."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise unsupported(param, f"{effort!r} is not one of {', '.join(EFFORTS)}"[:300])
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def tool_use(choice: Any, name: Any, tools: Sequence[Any] | None, parallel: bool) -> ToolUse:
    """Reads a tool choice that is `auto`, `none` (the tools stay in the prompt, but no calls are parsed), or
    requires a call: of the tool `name`, or of any tool if None."""
    if choice in ("auto", "none"):
        return ToolUse(choice, parallel=parallel)
    if choice not in ("required", "any") and not isinstance(name, str):
        raise unsupported("tool_choice", f"{choice!r} is not supported"[:300])
    if name is not None and name not in [tool["function"]["name"] for tool in tools or ()]:
        raise ApiError(f"tool_choice: {name!r} is not one of the tools"[:300], param="tool_choice")
    if not tools:
        raise ApiError("tool_choice: a call is required, but the request has no tools", param="tool_choice")
    return ToolUse("required", name, parallel)


def event(payload: dict[str, Any], name: str | None = None) -> bytes:
    return framed(exact.dumps(payload), name)


def framed(data: bytes, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def openai_error(refusal: ApiError) -> bytes:
    payload = {"message": str(refusal), "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return orjson.dumps({"error": payload})


def complete_history(messages: list[Message], problem: str, param: str) -> list[Message]:
    """Returns messages with tool results in the order of their calls.

    Raises ApiError if a call has no result: `problem`, in the words of the dialect, and the ids.
    """
    if missing := unanswered_calls(messages):
        raise ApiError(
            f"{problem}: {', '.join(missing[:8])[:500]}. Send a result for each call; that of one that was "
            "interrupted may say so",
            param=param,
        )
    return in_call_order(messages)
