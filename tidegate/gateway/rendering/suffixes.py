"""Renders the suffix after a reply with the chat template, and caches the templates of suffixes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from tidegate.gateway.parsing.parts import call_wire, function_tool
from tidegate.gateway.rendering.chat_template import ChatTemplate
from tidegate.gateway.rendering.suffix_template import (
    Continuation,
    MessageShape,
    SuffixTemplate,
    describe,
    infer,
)
from tidegate.service import exact
from tidegate.types import Message

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
