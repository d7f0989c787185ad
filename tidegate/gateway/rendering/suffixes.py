"""Renders the suffix after a reply with the chat template, and infers templates of suffixes.

There is one suffix template per shape of the new messages. A chat template that renders
`…<|im_start|>user\\n`, the content, `<|im_end|>\\n…` renders the same text around any content. A suffix
template is that text with slots. It is inferred by rendering markers, and used only if it also matches for
contents that templates treat specially (surrounding whitespace, quotes).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from tidegate.gateway.parsing.reply import call_wire, function_tool
from tidegate.gateway.rendering.chat_template import ChatTemplate
from tidegate.service import exact
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


_PLACEHOLDER = "zQstandQz"
_MAX_ENTRIES = 512  # message shapes; the cache is cleared when full
_USER: Message = {"role": "user", "content": "."}
_REPLY: Message = {"role": "assistant", "content": _PLACEHOLDER}
MINIMAL_PROMPT: list[Message] = [_USER]
TOOL = function_tool("f", "", x="integer")
CALL = call_wire("callabcde", "f", {"x": 1})
_LONGER: list[list[Message]] = [
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "callabcde", "name": "f"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    [*MINIMAL_PROMPT, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


class Unrenderable(Exception):
    """The template has no suffix after this reply; the complete history must be rendered."""


class Suffixes:
    """Renders the suffix after a reply, from the end of the reply's turn on. The reply is rendered as a
    placeholder: its sampled ids are recorded and never encoded again. `added` are the tokenizer's added
    tokens, `stops` the texts of the stop tokens."""

    def __init__(self, template: ChatTemplate, added: Collection[str], stops: Collection[str]) -> None:
        self._template = template
        self._added = added
        self.past_turn_end = self._find_past_turn_end()
        """The token that ends a past reply; empty if only the next role's marker ends it."""
        last = ""
        with contextlib.suppress(Unrenderable):
            last = self._tail(MINIMAL_PROMPT, Continuation(_REPLY, [], None, {}), prompt=False)
        self.turn_end = self._first_token(last) if last else self.past_turn_end
        """The token that ends the last reply and stops the model; in some formats not `past_turn_end`."""
        self._turn_ends = tuple({*stops, self.past_turn_end} - {""})

    def dates(self) -> list[str]:
        return self._template.dates()

    def after(self, before: list[Message], continuation: Continuation) -> str:
        """Returns the text after the reply. Raises Unrenderable if the template has none."""
        calls = continuation.reply.get("tool_calls")
        if calls:
            # A template that renders no calls may still render the suffix as after any text.
            with contextlib.suppress(Unrenderable):
                tail = self._tail(before, continuation._replace(reply=_with_calls(calls)))
                ends = [at for at in map(tail.find, self._turn_ends) if at >= 0]
                if ends:  # without the end of the call that contained the placeholder
                    return tail[min(ends) :]
        tail = self._tail(before, continuation._replace(reply=_REPLY))
        stripped = tail.lstrip()
        return stripped if stripped.startswith(self._turn_ends) else tail

    def try_after(self, before: list[Message], continuation: Continuation) -> str | None:
        try:
            return self.after(before, continuation)
        except Unrenderable:
            return None

    def _tail(self, before: list[Message], continuation: Continuation, prompt: bool = True) -> str:
        reply, new, tools, options = continuation
        try:
            text = self._template.render([*before, reply, *new], tools, options, prompt)
        except Exception as error:  # noqa: BLE001 - templates raise arbitrary exceptions
            raise Unrenderable(str(error)) from None
        if text.count(_PLACEHOLDER) != 1:
            raise Unrenderable("the template does not render a reply's content unchanged")
        return text.rpartition(_PLACEHOLDER)[2]

    def _find_past_turn_end(self) -> str:
        """Returns the token that follows a reply whatever message comes next; "" if it depends on that."""
        result: Message = {"role": "tool", "content": ".", "tool_call_id": "c", "name": "f"}
        firsts: set[str] = set()
        for new in ([_USER], [], [result]):
            with contextlib.suppress(Unrenderable):
                firsts.add(self._first_token(self._tail([_USER], Continuation(_REPLY, new, None, {}))))
        return firsts.pop() if len(firsts) == 1 else ""

    def _first_token(self, text: str) -> str:
        text = text.lstrip()
        return max((token for token in self._added if text.startswith(token)), key=len, default="")


def _with_calls(calls: list[dict[str, Any]]) -> Message:
    """Returns a reply whose last call has the placeholder as its argument."""
    marked = [
        {**call, "function": {"name": call["function"]["name"], "arguments": {"x": text}}}
        for call, text in zip(calls, ["."] * (len(calls) - 1) + [_PLACEHOLDER], strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": marked}


class _Entry(NamedTuple):
    template: SuffixTemplate | None  # None: this shape is rendered each time
    by_tools: bool = False  # the template holds for one list of tools


class SuffixCache:
    """Renders the suffix after a reply from a template cached by message shape."""

    def __init__(self, suffixes: Suffixes) -> None:
        self._suffixes = suffixes
        self._entries: dict[Any, _Entry] = {}
        self.invalidated = 0
        """Suffix templates that a later rendering contradicted."""

    def after(self, context: Callable[[], list[Message]], continuation: Continuation) -> str:
        """Returns the text after the reply; `context` returns the messages before it. Raises Unrenderable."""
        shape = describe(continuation.reply, continuation.new)
        if shape is None:
            return self._suffixes.after(context(), continuation)
        options = continuation.options
        settings = exact.dumps(options, orjson.OPT_SORT_KEYS) if options else b""
        key: Any = (shape.kinds, settings, *self._suffixes.dates())
        entry = self._entries.get(key) or self._store(key, self._new_entry(shape, continuation))
        if entry.by_tools:
            key = (*key, blake2b(exact.dumps(continuation.tools), digest_size=16).digest())
            entry = self._entries.get(key) or self._store(key, _Entry(self._infer(shape, continuation)))
        if entry.template is None:
            return self._suffixes.after(context(), continuation)
        text = entry.template.fill(shape.fields)
        entry.template.uses += 1
        if entry.template.uses & (entry.template.uses - 1) == 0:  # verify at uses 1, 2, 4, 8, …
            truth = self._suffixes.after(MINIMAL_PROMPT, continuation)
            if truth != text:
                self.invalidated += 1
                self._store(key, _Entry(None))
                return self._suffixes.after(context(), continuation)
        return text

    def _new_entry(self, shape: MessageShape, continuation: Continuation) -> _Entry:
        """Returns whether a suffix is the same after any history, any with the same tools, or neither."""
        plain = continuation._replace(tools=None)
        with_tools = continuation._replace(tools=continuation.tools or [TOOL])
        longer = {self._suffixes.try_after(before, with_tools) for before in _LONGER} - {None}
        if longer == {self._suffixes.try_after(MINIMAL_PROMPT, plain)}:
            return _Entry(self._infer(shape, plain))
        by_tools = continuation.tools and longer == {self._suffixes.try_after(MINIMAL_PROMPT, with_tools)}
        return _Entry(None, bool(by_tools))

    def _infer(self, shape: MessageShape, continuation: Continuation) -> SuffixTemplate | None:
        try:
            return infer(lambda other: self._suffixes.after(MINIMAL_PROMPT, other), continuation, shape)
        except Unrenderable:
            return None

    def _store(self, key: Any, entry: _Entry) -> _Entry:
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = entry
        return entry
