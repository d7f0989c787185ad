"""What a message means: its form for the chat template, and a digest that ignores how it is spelled.

Recorded ids are authoritative. A client may send a past message back with other whitespace around it,
null for absent, tool arguments in another key order or with 1 for 1.0, another call id, or without its
reasoning: that is the same message. Anything else that differs is another history.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.gateway.nesting import MAX_LEVELS, too_deep
from tidegate.types import Message

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_THOUGHT_END = "</think>"
_EXACT = 2**53
"""Below it float64 holds every integer."""


def template_form(message: Any, index: int) -> Message:
    """A message as chat templates want it: content a string, tool arguments a dict.

    Raises Refusal that names the message and what in it is not supported.
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ApiError(f"{where} is not an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise unsupported(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio", "refusal"):
        if message.get(key):
            raise unsupported(f"{where}.{key}", "is not supported")
    form: Message = {"role": _ROLES[role], "content": text_of(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(f"{where}.tool_calls is not a list", param="messages")
        form["tool_calls"] = [_call_form(call, f"{where}.tool_calls") for call in calls]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            form[key] = message[key]
    return form


def text_of(content: Any, where: str) -> str:
    """Content as one string; raises Refusal for anything that is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}.content is neither text nor a list of parts", param="messages")
    return "".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise unsupported(f"{where}.content", f"{kind!r} parts are not supported, only text")


def _call_form(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise unsupported(where, "only function calls with a name are supported")
    arguments = read_arguments(function.get("arguments"))
    if too_deep(arguments):
        raise ApiError(
            f"{where}: the arguments of {function['name']!r} are nested more than {MAX_LEVELS} levels deep; "
            "send flatter ones"[:300],
            param="messages",
        )
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def read_arguments(arguments: Any) -> Any:
    """Tool arguments as an object where they are one; what is not JSON stays the text it is."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return arguments


def meaning(form: Message) -> bytes:
    """A digest input that is equal for equal meanings; `form` is a `template_form`."""
    return orjson.dumps(
        (form["role"], _content(form), form.get("name"), _calls(form)), option=orjson.OPT_SORT_KEYS
    )


def resemble(recorded: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether `sent` begins with messages that have the roles of `recorded`, and each its text or its calls:
    other messages never render alike."""
    if len(recorded) > len(sent):
        return False
    pairs = zip(recorded, sent, strict=False)
    return all(_resembles(template_form(one, 0), template_form(other, 0)) for one, other in pairs)


def _resembles(one: Message, other: Message) -> bool:
    if one["role"] != other["role"]:
        return False
    calls = _calls(one)
    return _content(one) == _content(other) or (calls is not None and calls == _calls(other))


def in_one_spelling(messages: Sequence[Message]) -> list[Message]:
    """The template forms without what never makes a difference: reasoning, edges, the ids of calls."""
    numbers: dict[str, str] = {}
    forms = []
    for index, message in enumerate(messages):
        form = template_form(message, index)
        form.pop("reasoning_content", None)
        form["content"] = _content(form)
        for call, (_, arguments) in zip(form.get("tool_calls", ()), _calls(form) or (), strict=True):
            numbers[call["id"]] = call["id"] = f"call{len(numbers):05d}"
            call["function"]["arguments"] = orjson.loads(orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS))
        if form.get("tool_call_id") in numbers:
            form["tool_call_id"] = numbers[form["tool_call_id"]]
        forms.append(form)
    return forms


def _content(form: Message) -> str:
    """The text without reasoning and without whitespace at its edges."""
    content: str = form["content"]
    if form["role"] == "assistant" and _THOUGHT_END in content:
        content = content.partition(_THOUGHT_END)[2]
    return content.strip()


def _calls(form: Message) -> list[tuple[str, Any]] | None:
    """Names and arguments of an assistant's calls."""
    if form["role"] != "assistant" or "tool_calls" not in form:
        return None
    return [(call["function"]["name"], _plain(call["function"]["arguments"])) for call in form["tool_calls"]]


def _plain(value: Any) -> Any:
    """A JSON value with numbers as JavaScript tells them apart: 1.0 is 1, and an integer above 2^53 is the
    nearest float64."""
    if isinstance(value, int) and abs(value) >= _EXACT:
        return float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def chain(key: bytes, form: Message) -> bytes:
    """The key of a history and one message more."""
    return blake2b(meaning(form), digest_size=16, key=key).digest()


def root_key(tools: Any, options: Any) -> bytes:
    """The key of an empty history under these tools and template options."""
    what = orjson.dumps((tools or None, options or None), option=orjson.OPT_SORT_KEYS)
    return blake2b(what, digest_size=16).digest()
