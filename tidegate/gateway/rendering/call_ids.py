"""Shortens call ids for templates that accept only nine letters and digits."""

from __future__ import annotations

import re
from hashlib import blake2b

from tidegate.gateway.rendering.chat_template import ChatTemplate
from tidegate.types import Message

_SHORT = re.compile("[A-Za-z0-9]{9}")


def needs_short_ids(template: ChatTemplate) -> bool:
    """Whether the template accepts short call ids only."""
    return not _accepts(template, "call_0123456789abcdef") and _accepts(template, "abcdefghi")


def _accepts(template: ChatTemplate, call_id: str) -> bool:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    history: list[Message] = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": call_id, "name": "f"},
    ]
    try:
        template.render(history, None, {})
    except Exception:  # noqa: BLE001 - templates raise arbitrary exceptions
        return False
    return True


def short_id(call_id: str) -> str:
    """Map an id to nine letters and digits, deterministically; a short id stays."""
    return call_id if _SHORT.fullmatch(call_id) else blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def with_short_ids(messages: list[Message]) -> list[Message]:
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    form = dict(message)
    if "tool_calls" in form:
        form["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in form["tool_calls"]]
    if "tool_call_id" in form:
        form["tool_call_id"] = short_id(form["tool_call_id"])
    return form
