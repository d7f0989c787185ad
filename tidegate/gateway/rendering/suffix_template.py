"""Infers text templates of the suffix after a reply, one per shape of the new messages.

A chat template that renders `…<|im_start|>user\\n`, the content, `<|im_end|>\\n…` renders the same text
around any content. A suffix template is that text with slots. It is inferred by rendering markers, and used
only if it also matches for contents that templates treat specially (surrounding whitespace, quotes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from tidegate.types import Message

Suffix = Callable[[Message, list[Message]], str]
"""Renders the suffix, given the reply and the new messages."""

_MARK = re.compile("zQ([0-9]{5})Qz")  # nine letters and digits: some templates check the length of call ids
_PROBES = (" \n \"quoted\" \\ é🍎 <b> & 'x' \t\n", "x", "\n\nlines\n\n", '{"a": [1, "b"]}')


class MessageShape(NamedTuple):
    """The kinds of some messages, and the strings in them that vary."""

    kinds: tuple[object, ...]
    fields: list[str]
    contents: int  # number of leading fields that are contents


def describe(reply: Message, new: list[Message]) -> MessageShape | None:
    """The shape of messages; None for replies and blank messages, which templates treat by content."""
    calls = reply.get("tool_calls") or ()
    shape: list[object] = [len(calls)]
    contents: list[str] = []
    rest: list[str] = []
    for call in calls:
        rest += (call["id"], call["function"]["name"])
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


def with_fields(reply: Message, new: list[Message], fields: list[str]) -> tuple[Message, list[Message]]:
    """The messages with other strings as the fields of `describe`."""
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
    return ({**reply, "tool_calls": renamed_calls} if renamed_calls else reply), messages


def _identity(text: str) -> str:
    return text


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _stripped_in_json(text: str) -> str:
    return _in_json(text.strip())


_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    _identity, str.strip, str.lstrip, str.rstrip, _in_json, _stripped_in_json,
)  # fmt: skip


class SuffixTemplate:
    """Text with slots: `texts[0]`, the transformed field `slots[0]`, `texts[1]`, …"""

    def __init__(
        self, texts: list[str], slots: list[int], transforms: dict[int, Callable[[str], str]]
    ) -> None:
        self._texts = texts
        self._slots = slots
        self._transforms = transforms
        self.uses = 0

    def fill(self, fields: list[str]) -> str:
        parts = [self._texts[0]]
        for slot, text in zip(self._slots, self._texts[1:], strict=True):
            parts.append(self._transforms[slot](fields[slot]))
            parts.append(text)
        return "".join(parts)


def infer(suffix: Suffix, reply: Message, new: list[Message], shape: MessageShape) -> SuffixTemplate | None:
    """Infer the suffix template of a message shape; None if filling slots does not reproduce the suffix.

    Raises the exceptions of `suffix`.
    """
    marks = [f"zQ{index:05d}Qz" for index in range(len(shape.fields))]
    split = _MARK.split(suffix(*with_fields(reply, new, marks)))
    template = SuffixTemplate(
        split[::2], [int(mark) for mark in split[1::2]], dict.fromkeys(range(len(marks)), _identity)
    )
    for slot in range(shape.contents):
        fields = [*marks[:slot], _PROBES[0], *marks[slot + 1 :]]
        written = suffix(*with_fields(reply, new, fields))
        for form in _TRANSFORMS:
            template._transforms[slot] = form
            if template.fill(fields) == written:
                break
        else:
            return None
    for probe in _PROBES:
        fields = [probe] * shape.contents + marks[shape.contents :]
        if template.fill(fields) != suffix(*with_fields(reply, new, fields)):
            return None
    return template
