"""What a message means: its form for the chat template, and a digest that ignores how it is spelled.

Recorded ids are authoritative. A client may send a past message back with other whitespace around it,
null for absent, tool arguments in another key order or with 1 for 1.0, another call id, or without its
reasoning: that is the same message. Anything else that differs is another history.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import orjson

from tidegate.gateway.refusal import Refusal, unsupported
from tidegate.types import Message

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_THOUGHT_END = "</think>"


def template_form(message: Any, index: int) -> Message:
    """A message as chat templates want it: content a string, tool arguments a dict.

    Raises Refusal that names the message and what in it is not supported.
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise Refusal(f"{where} is not an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise unsupported(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio", "refusal"):
        if message.get(key):
            raise unsupported(f"{where}.{key}", "is not supported")
    form: Message = {"role": _ROLES[role], "content": text_of(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refusal(f"{where}.tool_calls is not a list", param="messages")
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
        raise Refusal(f"{where}.content is neither text nor a list of parts", param="messages")
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
    content: str = form["content"]
    calls = None
    if form["role"] == "assistant":
        if _THOUGHT_END in content:
            content = content.partition(_THOUGHT_END)[2]
        if "tool_calls" in form:
            calls = [
                (call["function"]["name"], _plain(call["function"]["arguments"]))
                for call in form["tool_calls"]
            ]
    return orjson.dumps((form["role"], content.strip(), form.get("name"), calls), option=orjson.OPT_SORT_KEYS)


def _plain(value: Any) -> Any:
    """A JSON value with whole numbers as integers: many clients cannot tell 1.0 from 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
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
