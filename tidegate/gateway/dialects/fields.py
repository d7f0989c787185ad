"""Fields of request bodies: read with their types, refused by their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.parsing.parts import ToolUse
from tidegate.gateway.sampling import Schema

_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
"""Accepted without effect: no template asks for a verbosity."""
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0}
"""Penalties of OpenAI's dialects and of their extensions, with their neutral values."""


def get(payload: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """A field's value, None where it is absent or null; raises Refusal for another type."""
    value = payload.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        param = where + name
        raise ApiError(f"{param} must be {_KINDS[kind]}, not {value!r}"[:300], param=param)
    return value


def within(payload: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number that must lie in low..high."""
    value: float | None = get(payload, name, float)
    if value is not None and not low <= value <= high:
        raise ApiError(f"{name} must lie in {low:g}..{high:g}", param=name)
    return value


def at_least_1(payload: Mapping[str, Any], name: str) -> int | None:
    value: int | None = get(payload, name, int)
    if value is not None and value < 1:
        raise ApiError(f"{name} must be at least 1", param=name)
    return value


def top_p(payload: Mapping[str, Any]) -> float | None:
    value: float | None = get(payload, "top_p", float)
    if value is not None and not 0 < value <= 1:
        raise ApiError("top_p must lie in (0, 1]", param="top_p")
    return value


def refuse_others(
    payload: Mapping[str, Any], known: Collection[str], only: Mapping[str, Sequence[Any]], where: str = ""
) -> None:
    """Raises Refusal for what is not known; `only` has the values, besides null, that can be honoured."""
    for name in payload.keys() - known:
        value = payload[name]
        if value is None or value in only.get(name, ()):
            continue
        if name in only:
            able = " or ".join(map(repr, only[name]))
            raise unsupported(where + name, f"{value!r} is not supported, only {able}"[:300])
        raise unsupported(where + name, "this parameter is not supported")


def penalties(payload: Mapping[str, Any]) -> dict[str, float]:
    """Those that are not at their neutral values."""
    values = {name: get(payload, name, float) for name in PENALTIES}
    return {name: v for name, v in values.items() if v is not None and v != PENALTIES[name]}


def stops(payload: Mapping[str, Any], name: str) -> Sequence[str]:
    """Stop strings; one alone may stand without a list."""
    given = payload.get(name)
    if given is None:
        return ()
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ApiError(f"{name} must be a string or a list of strings, none of them empty", param=name)
    return found


def schema(form: Mapping[str, Any], holder: Mapping[str, Any], param: str) -> Schema | None:
    """What a reply must be: `form` is `{"type": …}`, whose schema is in `holder`; None for text."""
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return Schema(param, '{"type":"object"}')
        case "json_schema" if isinstance(holder.get("schema"), dict):
            return Schema(param, orjson.dumps(holder["schema"]).decode())
        case other:
            raise unsupported(param, f"{other!r} is not supported, or has no schema"[:300])


def effort_options(effort: Any, param: str) -> dict[str, Any]:
    """Template options for a reasoning effort. Nothing but the template acts on one."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise unsupported(param, f"{effort!r} is not one of {', '.join(EFFORTS)}"[:300])
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def required_tool(choice: Any, name: Any, tools: Sequence[str], parallel: bool) -> ToolUse:
    """A tool choice that demands a call, of the tool `name` unless the choice is `required` or `any`."""
    if choice not in ("required", "any") and not isinstance(name, str):
        raise unsupported("tool_choice", f"{choice!r} is not supported"[:300])
    if name is not None and name not in tools:
        raise ApiError(f"tool_choice: {name!r} is none of the tools"[:300], param="tool_choice")
    if not tools:
        raise ApiError("tool_choice: a call is demanded, and there are no tools", param="tool_choice")
    return ToolUse("required", name, parallel)


def event(payload: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(payload) + b"\n\n"


def openai_error(refusal: ApiError) -> bytes:
    """The error body of OpenAI's dialects."""
    told = {
        "message": str(refusal),
        "type": refusal.type,
        "param": refusal.param,
        "code": refusal.code,
    }
    return orjson.dumps({"error": told})
