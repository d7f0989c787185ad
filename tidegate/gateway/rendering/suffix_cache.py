"""The frames of one template, and where each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from tidegate.gateway.rendering.chat_template import Suffixes, Unrenderable
from tidegate.gateway.rendering.suffix_template import MessageShape, SuffixTemplate, describe, infer
from tidegate.types import Message

_MOST = 512  # shapes; a client that sends more kinds of requests than that learns some of them twice
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
    frame: SuffixTemplate | None  # None: this shape is rendered each time
    by_tools: bool  # the frame holds for one list of tools


class SuffixCache:
    """Fills what follows a reply into the frame of its shape; learns the frame when it first comes."""

    def __init__(self, suffixes: Suffixes) -> None:
        self._suffixes = suffixes
        self._entries: dict[Any, _Entry] = {}
        self.dropped = 0
        """Frames that the template was seen to contradict."""

    def after(
        self,
        context: Callable[[], list[Message]],
        reply: Message,
        new: list[Message],
        tools: Any,
        options: dict[str, Any],
    ) -> str:
        """What the template writes after `reply`. Raises Unrenderable."""
        known = describe(reply, new)
        if known is None:
            return self._suffixes.after(context(), reply, new, tools, options)
        key: Any = (known.shape, orjson.dumps(options, option=orjson.OPT_SORT_KEYS) if options else b"")
        entry = self._entries.get(key)
        if entry is None:
            entry = self._learn(key, known, reply, new, tools, options)
        if entry.by_tools:
            key = (*key, blake2b(orjson.dumps(tools), digest_size=16).digest())
            entry = self._entries.get(key) or self._note(
                key, _Entry(self._frame(known, reply, new, tools, options), False)
            )
        if entry.frame is None:
            return self._suffixes.after(context(), reply, new, tools, options)
        text = entry.frame.fill(known.fields)
        entry.frame.uses += 1
        if entry.frame.uses & (entry.frame.uses - 1) == 0:  # again and again, ever more seldom
            truth = self._suffixes.after(MINIMAL_PROMPT, reply, new, tools, options)
            if truth != text:
                self.dropped += 1
                self._note(key, _Entry(None, False))
                return self._suffixes.after(context(), reply, new, tools, options)
        return text

    def _learn(
        self, key: Any, known: MessageShape, reply: Message, new: list[Message], tools: Any, options: Any
    ) -> _Entry:
        """Where is what follows the same: after any history, or after any with these tools?"""
        given = tools or [TOOL]
        plain = self._try(MINIMAL_PROMPT, reply, new, None, options)
        longer = [self._try(before, reply, new, given, options) for before in _LONGER]
        if plain is not None and _all_are(plain, longer):
            return self._note(key, _Entry(self._frame(known, reply, new, None, options), False))
        with_tools = self._try(MINIMAL_PROMPT, reply, new, given, options)
        if tools and with_tools is not None and _all_are(with_tools, longer):
            return self._note(key, _Entry(None, True))
        return self._note(key, _Entry(None, False))

    def _frame(
        self, known: MessageShape, reply: Message, new: list[Message], tools: Any, options: Any
    ) -> SuffixTemplate | None:
        def suffix(reply: Message, new: list[Message]) -> str:
            return self._suffixes.after(MINIMAL_PROMPT, reply, new, tools, options)

        try:
            return infer(suffix, reply, new, known)
        except Unrenderable:
            return None

    def _try(
        self, before: list[Message], reply: Message, new: list[Message], tools: Any, options: Any
    ) -> str | None:
        try:
            return self._suffixes.after(before, reply, new, tools, options)
        except Unrenderable:
            return None

    def _note(self, key: Any, entry: _Entry) -> _Entry:
        if len(self._entries) >= _MOST:
            self._entries.clear()
        self._entries[key] = entry
        return entry


def _all_are(text: str, others: Sequence[str | None]) -> bool:
    """Whether all histories that the template takes give this text; at least one must."""
    taken = [other for other in others if other is not None]
    return bool(taken) and all(other == text for other in taken)
