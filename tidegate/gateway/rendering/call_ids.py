"""Call ids as templates take them: some refuse any id that is not nine letters and digits."""

from __future__ import annotations

import re
from hashlib import blake2b

from tidegate.gateway.rendering.chat_template import ChatTemplate
from tidegate.types import Message

_SHORT = re.compile("[A-Za-z0-9]{9}")


def wants_short_ids(template: ChatTemplate) -> bool:
    """Whether the template takes a tool's result under a short id alone."""
    return not _takes(template, "call_0123456789abcdef") and _takes(template, "abcdefghi")


def _takes(template: ChatTemplate, key: str) -> bool:
    call = {"id": key, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    history: list[Message] = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": key, "name": "f"},
    ]
    try:
        template.render(history, None, {})
    except Exception:  # noqa: BLE001 - the template is the model's code; it refuses as it likes
        return False
    return True


def short(key: str) -> str:
    """The same nine signs for the same id; an id that has them already stays."""
    return key if _SHORT.fullmatch(key) else blake2b(key.encode(), digest_size=5).hexdigest()[:9]


def with_short_ids(messages: list[Message]) -> list[Message]:
    return [_shortened(message) for message in messages]


def _shortened(message: Message) -> Message:
    form = dict(message)
    if "tool_calls" in form:
        form["tool_calls"] = [{**call, "id": short(call["id"])} for call in form["tool_calls"]]
    if "tool_call_id" in form:
        form["tool_call_id"] = short(form["tool_call_id"])
    return form
