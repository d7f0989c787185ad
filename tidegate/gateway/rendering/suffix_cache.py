"""Caches the suffix templates of a chat template, and where each is valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from tidegate.gateway.rendering.chat_template import Suffixes, Unrenderable
from tidegate.gateway.rendering.suffix_template import MessageShape, SuffixTemplate, describe, infer
from tidegate.types import Message

_MAX_ENTRIES = 512  # message shapes; the cache is cleared when full
MINIMAL_PROMPT: list[Message] = [{"role": "user", "content": "."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
CALL = {"id": "callabcde", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
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


class _Entry(NamedTuple):
    template: SuffixTemplate | None  # None: this shape is rendered each time
    by_tools: bool  # the template holds for one list of tools


class SuffixCache:
    """Renders the suffix after a reply from a template cached by message shape."""

    def __init__(self, suffixes: Suffixes) -> None:
        self._suffixes = suffixes
        self._entries: dict[Any, _Entry] = {}
        self.invalidated = 0
        """Suffix templates that a later rendering contradicted."""

    def after(
        self,
        context: Callable[[], list[Message]],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
    ) -> str:
        """The text after `reply`. Raises Unrenderable."""
        shape = describe(reply, new)
        if shape is None:
            return self._suffixes.after(context(), reply, new, tools, options)
        key: Any = (shape.kinds, orjson.dumps(options, option=orjson.OPT_SORT_KEYS) if options else b"")
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key, shape, reply, new, tools, options)
        if entry.by_tools:
            key = (*key, blake2b(orjson.dumps(tools), digest_size=16).digest())
            entry = self._entries.get(key) or self._store(
                key, _Entry(self._infer(shape, reply, new, tools, options), False)
            )
        if entry.template is None:
            return self._suffixes.after(context(), reply, new, tools, options)
        text = entry.template.fill(shape.fields)
        entry.template.uses += 1
        if entry.template.uses & (entry.template.uses - 1) == 0:  # verify at uses 1, 2, 4, 8, …
            truth = self._suffixes.after(MINIMAL_PROMPT, reply, new, tools, options)
            if truth != text:
                self.invalidated += 1
                self._store(key, _Entry(None, False))
                return self._suffixes.after(context(), reply, new, tools, options)
        return text

    def _add(
        self, key: Any, shape: MessageShape, reply: Message, new: list[Message], tools: Any, options: Any
    ) -> _Entry:
        """Add a shape whose suffix is the same after any history, any with the same tools, or neither."""
        given = tools or [TOOL]
        plain = self._try(MINIMAL_PROMPT, reply, new, None, options)
        longer = [self._try(before, reply, new, given, options) for before in _LONGER]
        if plain is not None and _all_equal(plain, longer):
            return self._store(key, _Entry(self._infer(shape, reply, new, None, options), False))
        with_tools = self._try(MINIMAL_PROMPT, reply, new, given, options)
        if tools and with_tools is not None and _all_equal(with_tools, longer):
            return self._store(key, _Entry(None, True))
        return self._store(key, _Entry(None, False))

    def _infer(
        self, shape: MessageShape, reply: Message, new: list[Message], tools: Any, options: Any
    ) -> SuffixTemplate | None:
        def suffix(reply: Message, new: list[Message]) -> str:
            return self._suffixes.after(MINIMAL_PROMPT, reply, new, tools, options)

        try:
            return infer(suffix, reply, new, shape)
        except Unrenderable:
            return None

    def _try(
        self, before: list[Message], reply: Message, new: list[Message], tools: Any, options: Any
    ) -> str | None:
        try:
            return self._suffixes.after(before, reply, new, tools, options)
        except Unrenderable:
            return None

    def _store(self, key: Any, entry: _Entry) -> _Entry:
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.clear()
        self._entries[key] = entry
        return entry


def _all_equal(text: str, others: Sequence[str | None]) -> bool:
    """Whether all accepted histories give `text`; at least one must be accepted."""
    accepted = [other for other in others if other is not None]
    return bool(accepted) and all(other == text for other in accepted)
