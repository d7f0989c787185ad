"""Converts messages for the chat template, and digests their meaning.

Recorded ids are authoritative. A past message counts as unchanged if a client returns it with different
surrounding whitespace, null for absent, another key order or 1 for 1.0 in tool arguments, another call id, or
without its reasoning. Any other difference makes another history.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError, unsupported
from tidegate.service import exact
from tidegate.types import Message

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_THOUGHT_END = "</think>"
_LARGEST = 2**1023
"""Integers beyond have no float64."""


def template_form(message: Any, index: int) -> Message:
    """Converts a message for chat templates: content to text, tool arguments to a dict. Raises ApiError."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ApiError(f"{where} is not an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise unsupported(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
    for key in ("function_call", "audio", "refusal"):
        if message.get(key):
            raise unsupported(f"{where}.{key}", "is not supported")
    content = message.get("content")
    form: Message = {"role": _ROLES[role], "content": ""}
    if content is not None:
        form["content"] = text_of(content, f"{where}.content")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(f"{where}.tool_calls is not a list", param="messages")
        form["tool_calls"] = [_call_form(call, f"{where}.tool_calls") for call in calls]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            form[key] = message[key]
    return form


def in_call_order(messages: list[Message]) -> list[Message]:
    """Returns messages with the results of each reply's tool calls in the order of the calls.

    Clients send results as they complete, and say by id which call each answers. Many templates write no ids,
    so that a model reads the first result as that of the first call. The results after a reply exchange their
    places; messages between them, and results with other ids, keep theirs.
    """
    ordered = messages
    start = 0
    for end in [*(at for at, each in enumerate(messages) if _role(each) == "assistant"), len(messages)]:
        ids = _call_ids(messages[start - 1]) if start else []
        numbers: dict[int, int] = {}
        for at in range(start, end) if len(ids) > 1 else ():
            answered = messages[at].get("tool_call_id") if _role(messages[at]) == "tool" else None
            if answered is not None and answered in ids:
                numbers[at] = ids.index(answered)
                ids[numbers[at]] = None  # a repeated id names the next call that has it
        if [*numbers.values()] != sorted(numbers.values()):
            ordered = [*ordered]
            for place, at in zip(numbers, sorted(numbers, key=numbers.__getitem__), strict=True):
                ordered[place] = messages[at]
        start = end + 1
    return ordered


def unanswered_calls(messages: Sequence[Message]) -> list[str]:
    """Returns the ids of tool calls that have no result before the next reply.

    Consecutive messages of the assistant are one reply. A result without an id answers the first call left.
    """
    missing: list[Any] = []
    pending: list[Any] = []
    before = None
    for message in messages:
        role = _role(message)
        if role == "assistant":
            if before != "assistant":
                missing, pending = missing + pending, []
            pending += _call_ids(message)
        elif role == "tool" and pending:
            answered = message.get("tool_call_id")
            if answered is None or answered in pending:
                pending.remove(pending[0] if answered is None else answered)
        before = role
    return [str(one) for one in missing + pending]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _call_ids(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",), joint: str = "") -> str:
    """Returns content, a text or a list of parts, as one string. Raises ApiError for parts other than text.
    `where` is the content's place in the request; `kinds` are the types of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} is neither text nor a list of parts", param=where.partition("[")[0])
    return joint.join(text_of_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def text_of_part(part: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise unsupported(where, f"{kind!r} parts are not supported here, only text"[:300])
    text: str = part["text"]
    return text


def _call_form(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise unsupported(where, "only function calls with a name are supported")
    arguments = _read_arguments(function.get("arguments"))
    if exact.too_deep(arguments):
        raise ApiError(
            f"{where}: the arguments of {function['name']!r} are nested more than {exact.MAX_LEVELS} levels "
            "deep; send flatter ones"[:300],
            param="messages",
        )
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _read_arguments(arguments: Any) -> Any:
    """Parses tool arguments; invalid JSON stays text."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        return exact.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def meaning(form: Message) -> bytes:
    """Bytes that are equal for messages of equal meaning; `form` is a `template_form`."""
    content = (form["role"], _content(form), form.get("name"), _calls(form))
    return exact.dumps(content, orjson.OPT_SORT_KEYS)


def resemble(recorded: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether `sent` begins with messages that match `recorded` in role, and in text or calls; others never
    render alike."""
    if len(recorded) > len(sent):
        return False
    for first, second in zip(recorded, sent, strict=False):
        one, other = template_form(first, 0), template_form(second, 0)
        calls = _calls(one)
        alike = _content(one) == _content(other) or (calls is not None and calls == _calls(other))
        if one["role"] != other["role"] or not alike:
            return False
    return True


def begins_with(reply: Message, message: Message) -> bool:
    """Whether `message` is the beginning of a reply."""
    complete, partial = template_form(reply, 0), template_form(message, 0)
    for name in ("content", "reasoning_content"):
        if not complete.get(name, "").lstrip().startswith(partial.get(name, "").lstrip()):
            return False
    calls = partial.get("tool_calls", [])
    begun, read = (
        meaning({"role": "assistant", "content": "", "tool_calls": form})
        for form in (complete.get("tool_calls", [])[: len(calls)], calls)
    )
    return begun == read


def normalized(messages: Sequence[Message]) -> list[Message]:
    """The template forms without reasoning, surrounding whitespace and call ids, which never matter."""
    numbers: dict[str, str] = {}
    forms = []
    for index, message in enumerate(messages):
        form = template_form(message, index)
        form.pop("reasoning_content", None)
        form["content"] = _content(form)
        for call, (_, arguments) in zip(form.get("tool_calls", ()), _calls(form) or (), strict=True):
            numbers[call["id"]] = call["id"] = f"call{len(numbers):05d}"
            call["function"]["arguments"] = exact.loads(exact.dumps(arguments, orjson.OPT_SORT_KEYS))
        if form.get("tool_call_id") in numbers:
            form["tool_call_id"] = numbers[form["tool_call_id"]]
        forms.append(form)
    return forms


def _content(form: Message) -> str:
    """The text without reasoning and surrounding whitespace."""
    content: str = form["content"]
    if form["role"] == "assistant" and _THOUGHT_END in content:
        content = content.partition(_THOUGHT_END)[2]
    return content.strip()


def _calls(form: Message) -> list[tuple[str, Any]] | None:
    if form["role"] != "assistant" or "tool_calls" not in form:
        return None
    return [
        (call["function"]["name"], _normalized_numbers(call["function"]["arguments"]))
        for call in form["tool_calls"]
    ]


def _normalized_numbers(value: Any) -> Any:
    """A JSON value with its numbers as in JavaScript: 1.0 is 1, and an integer above 2^53 is the nearest
    float64."""
    if isinstance(value, int) and exact.EXACT <= abs(value) < _LARGEST:
        return float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < exact.EXACT:
        return int(value)
    if isinstance(value, list):
        return [_normalized_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _normalized_numbers(item) for key, item in value.items()}
    return value


def chain(key: bytes, form: Message) -> bytes:
    """The digest of a history with digest `key` and one more message."""
    return blake2b(meaning(form), digest_size=16, key=key).digest()


def root_key(tools: Any, options: Any, policy: str = "") -> bytes:
    named = (policy,) if policy else ()
    what = exact.dumps((tools or None, options or None, *named), orjson.OPT_SORT_KEYS)
    return blake2b(what, digest_size=16).digest()
