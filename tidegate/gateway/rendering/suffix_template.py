"""Frames: what a template writes around new messages, learned once for each shape of them.

A template that writes `…<|im_start|>user\\n`, the content, `<|im_end|>\\n…` writes the same around any
content. The frame is that text with slots. It is learned by rendering marks, and believed only where it
gives what the template gives for contents that templates treat in ways of their own (edges, quotes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from tidegate.types import Message

Suffix = Callable[[Message, list[Message]], str]
"""What the template writes after a reply, given the reply and the new messages."""

_MARK = re.compile("zQ([0-9]{5})Qz")  # nine letters and digits: some templates check the size of call ids
_PROBES = (" \n \"quoted\" \\ é🍎 <b> & 'x' \t\n", "x", "\n\nlines\n\n", '{"a": [1, "b"]}')


class MessageShape(NamedTuple):
    """What kinds of messages these are, and the strings in them that vary."""

    shape: tuple[object, ...]
    fields: list[str]
    contents: int  # of the fields, so many are contents; they come first


def describe(reply: Message, new: list[Message]) -> MessageShape | None:
    """None where messages are of a kind that templates treat by their content: replies and blanks."""
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
    """The messages with other strings in the places that `describe` tells."""
    calls = reply.get("tool_calls") or ()
    ids = [call["id"] for call in calls]
    rest = iter(fields[len(new) :])
    made = []
    for call in calls:
        key, name = next(rest), next(rest)
        made.append({**call, "id": key, "function": {**call["function"], "name": name}})
    told: list[Message] = []
    for message, content in zip(new, fields, strict=False):
        form = {**message, "content": content}
        if "name" in message:
            form["name"] = next(rest)
        answered = message.get("tool_call_id")
        if answered in ids:
            form["tool_call_id"] = made[ids.index(answered)]["id"]
        elif answered is not None:
            form["tool_call_id"] = next(rest)
        told.append(form)
    return ({**reply, "tool_calls": made} if made else reply), told


def _as_it_is(text: str) -> str:
    return text


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _stripped_in_json(text: str) -> str:
    return _in_json(text.strip())


_FORMS: tuple[Callable[[str], str], ...] = (
    _as_it_is, str.strip, str.lstrip, str.rstrip, _in_json, _stripped_in_json,
)  # fmt: skip


class SuffixTemplate:
    """Text with slots: `texts[0]`, field `slots[0]` in its form, `texts[1]`, …"""

    def __init__(self, texts: list[str], slots: list[int], forms: dict[int, Callable[[str], str]]) -> None:
        self._texts = texts
        self._slots = slots
        self._forms = forms
        self.uses = 0

    def fill(self, fields: list[str]) -> str:
        parts = [self._texts[0]]
        for slot, text in zip(self._slots, self._texts[1:], strict=True):
            parts.append(self._forms[slot](fields[slot]))
            parts.append(text)
        return "".join(parts)


def infer(suffix: Suffix, reply: Message, new: list[Message], known: MessageShape) -> SuffixTemplate | None:
    """The frame around messages like these; None where the template does more than fill slots.

    Raises what `suffix` raises.
    """
    marks = [f"zQ{index:05d}Qz" for index in range(len(known.fields))]
    split = _MARK.split(suffix(*with_fields(reply, new, marks)))
    frame = SuffixTemplate(
        split[::2], [int(one) for one in split[1::2]], dict.fromkeys(range(len(marks)), _as_it_is)
    )
    for slot in range(known.contents):
        fields = [*marks[:slot], _PROBES[0], *marks[slot + 1 :]]
        written = suffix(*with_fields(reply, new, fields))
        for form in _FORMS:
            frame._forms[slot] = form
            if frame.fill(fields) == written:
                break
        else:
            return None
    for probe in _PROBES:
        fields = [probe] * known.contents + marks[known.contents :]
        if frame.fill(fields) != suffix(*with_fields(reply, new, fields)):
            return None
    return frame
