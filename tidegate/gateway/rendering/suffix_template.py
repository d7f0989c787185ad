"""Infers text templates of the suffix after a reply, one per shape of the new messages.

A chat template that renders `…<|im_start|>user\\n`, the content, `<|im_end|>\\n…` renders the same text
around any content. A suffix template is that text with slots. It is inferred by rendering markers, and used
only if it also matches for contents that templates treat specially (surrounding whitespace, quotes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tidegate.types import Message

_MARK = re.compile("zQ([0-9]{5})Qz")  # nine letters and digits: some templates check the length of call ids
_PROBES = (" \n \"quoted\" \\ é🍎 <b> & 'x' \t\n", "x", "\n\nlines\n\n", '{"a": [1, "b"]}')


class Continuation(NamedTuple):
    """A reply, the new messages after it, and the tools and template options of the request."""

    reply: Message
    new: list[Message]
    tools: Any
    options: dict[str, Any]


class MessageShape(NamedTuple):
    """The kinds of a continuation's messages, and the strings in them that vary."""

    kinds: tuple[object, ...]
    fields: list[str]
    contents: int  # number of leading fields that are contents


def describe(reply: Message, new: list[Message]) -> MessageShape | None:
    """Returns the shape of messages; None for replies and blank messages: templates treat them by content."""
    calls = reply.get("tool_calls") or ()
    shape: list[object] = [len(calls)]
    contents: list[str] = []
    rest = [text for call in calls for text in (call["id"], call["function"]["name"])]
    ids = rest[::2]
    for message in new:
        role, content = message["role"], message["content"]
        if role == "assistant" or not content or content.isspace():
            return None
        contents.append(content)
        name, answered = message.get("name"), message.get("tool_call_id")
        if name is not None:
            rest.append(name)
        if answered in ids:
            shape.append((role, name is not None, ids.index(answered)))
        else:
            shape.append((role, name is not None, answered is not None))
            if answered is not None:
                rest.append(answered)
    return MessageShape(tuple(shape), contents + rest, len(contents))


def with_fields(continuation: Continuation, fields: list[str]) -> Continuation:
    """Returns the messages with other strings as the fields of `describe`."""
    reply, new = continuation.reply, continuation.new
    calls = reply.get("tool_calls") or ()
    ids = [call["id"] for call in calls]
    rest = iter(fields[len(new) :])
    renamed_calls = []
    for call in calls:
        key, name = next(rest), next(rest)
        renamed_calls.append({**call, "id": key, "function": {**call["function"], "name": name}})
    messages: list[Message] = []
    for message, content in zip(new, fields, strict=False):
        form = {**message, "content": content}
        if "name" in message:
            form["name"] = next(rest)
        answered = message.get("tool_call_id")
        if answered in ids:
            form["tool_call_id"] = renamed_calls[ids.index(answered)]["id"]
        elif answered is not None:
            form["tool_call_id"] = next(rest)
        messages.append(form)
    if renamed_calls:
        reply = {**reply, "tool_calls": renamed_calls}
    return continuation._replace(reply=reply, new=messages)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    str, str.strip, str.lstrip, str.rstrip, _in_json, lambda text: _in_json(text.strip()),
)  # fmt: skip


class SuffixTemplate:
    """Text with slots: `texts[0]`, the transformed field `slots[0]`, `texts[1]`, …"""

    def __init__(self, texts: list[str], slots: list[int], fields: int) -> None:
        self._texts = texts
        self._slots = slots
        self.transforms = [_TRANSFORMS[0]] * fields
        self.uses = 0

    def fill(self, fields: list[str]) -> str:
        parts = [self._texts[0]]
        for slot, text in zip(self._slots, self._texts[1:], strict=True):
            parts += (self.transforms[slot](fields[slot]), text)
        return "".join(parts)


def infer(
    suffix: Callable[[Continuation], str], continuation: Continuation, shape: MessageShape
) -> SuffixTemplate | None:
    """Infers the suffix template of a message shape; None if filling slots does not reproduce the suffix.
    Raises the exceptions of `suffix`, which renders a continuation."""
    marks = [f"zQ{index:05d}Qz" for index in range(len(shape.fields))]
    split = _MARK.split(suffix(with_fields(continuation, marks)))
    template = SuffixTemplate(split[::2], [int(mark) for mark in split[1::2]], len(marks))
    for slot in range(shape.contents):
        fields = [*marks[:slot], _PROBES[0], *marks[slot + 1 :]]
        written = suffix(with_fields(continuation, fields))
        for form in _TRANSFORMS:
            template.transforms[slot] = form
            if template.fill(fields) == written:
                break
        else:
            return None
    for probe in _PROBES:
        fields = [probe] * shape.contents + marks[shape.contents :]
        if template.fill(fields) != suffix(with_fields(continuation, fields)):
            return None
    return template
