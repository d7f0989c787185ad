"""Turns sampled ids into text truncated at stop strings, reasoning and tool calls.

Streamed and complete replies use the same pipeline, so the recorded reply equals the streamed one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from tidegate.gateway.ids import unique_name
from tidegate.gateway.parsing.parts import Part, Reasoning, ReplyParser, SampledCall, call_wire, find_first
from tidegate.gateway.rendering.messages import meaning, template_form
from tidegate.types import Message

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "�"
"""The decoded form of an incomplete UTF-8 character."""
_LONGEST_CHARACTER = 4  # ids; the most bytes of a UTF-8 character
_WINDOW = 6  # ids of context needed to decode the next ids as within the complete text


class Detokenizer:
    """Decodes ids incrementally without splitting characters."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # index of the first context id
        self._done = 0  # number of ids whose text was returned

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the certain text and holds back a possibly incomplete character."""
        self._ids.extend(ids)
        for held in range(_LONGEST_CHARACTER):
            end = len(self._ids) - held
            if end <= self._done:
                return ""
            text = self._fresh(end)
            if not text.endswith(UNFINISHED):
                break
        # Else the earlier bytes are invalid: only the last ids can still complete a character.
        self._start = max(self._start, end - _WINDOW)
        self._done = end
        return text

    def finish(self) -> str:
        """The remaining text, including an incomplete character."""
        if self._done == len(self._ids):
            return ""
        text = self._fresh(len(self._ids))
        self._done = len(self._ids)
        return text

    def _fresh(self, end: int) -> str:
        if self._done == 0:
            return self._decode(self._ids[:end])
        context = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start : end])[len(context) :]


class StopCutter:
    """Passes text up to the first stop string; holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        certain, self.stopped = find_first(text, self._stops)
        self._held = text[certain:] if self.stopped is None else ""
        return text[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def stop_after(decode: Decode, stops: Sequence[str], ids: Sequence[int]) -> int | None:
    """Number of ids up to the end of the first stop string in their text; None without one."""

    def stopped(size: int) -> bool:
        text = decode(ids[:size])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=stopped)


class ReplyReader:
    """Parses one reply; `parts` grows as ids arrive. `prefill` is text at the end of the prompt that belongs
    to the reply."""

    def __init__(self, decode: Decode, stops: Sequence[str], parser: ReplyParser, prefill: str = "") -> None:
        self._text = Detokenizer(decode)
        self._cut = StopCutter(stops)
        self._parser = parser
        self.parts: list[Part] = []
        self.call_ids: list[str] = []
        self.part_ends: list[int] = []
        """For each part, the number of ids when it became certain."""
        self.seen = 0
        self.prefill = prefill
        self._add(parser.feed(prefill))

    def push(self, ids: Sequence[int]) -> None:
        """Add the ids that follow the first `seen` ones."""
        self.seen += len(ids)
        self._add(self._parser.feed(self._cut.feed(self._text.push(ids))))

    def finish(self) -> None:
        rest = self._cut.feed(self._text.finish()) + self._cut.finish()
        self._add(self._parser.feed(rest))
        self._add(self._parser.finish())

    def _add(self, parts: list[Part]) -> None:
        self.parts += parts
        self.part_ends += [self.seen] * len(parts)
        self.call_ids += [f"call_{unique_name()[:24]}" for part in parts if isinstance(part, SampledCall)]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the reply."""
        return self._cut.stopped

    @property
    def status(self) -> str | None:
        return self._parser.status

    def truncate(self, count: int) -> None:
        del self.parts[count:], self.part_ends[count:]
        del self.call_ids[sum(isinstance(part, SampledCall) for part in self.parts) :]

    def message(self) -> Message:
        content = "".join(part for part in self.parts if isinstance(part, str))
        calls = [part for part in self.parts if isinstance(part, SampledCall)]
        reasoning = "".join(part.text for part in self.parts if isinstance(part, Reasoning))
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                call_wire(key, call.name, call.arguments)
                for key, call in zip(self.call_ids, calls, strict=True)
            ]
        return message


def count_read_ids(
    reader: Callable[[], ReplyReader], ids: Sequence[int], message: Message, first: int = 0
) -> int | None:
    """Number of a reply's ids, at least `first`, that a client has read whose copy of the reply is `message`.
    None if the reply does not begin with `message`. `reader` creates a reader for the reply."""

    def reach(count: int) -> bool:
        fresh = reader()
        fresh.push(ids[:count])
        fresh.finish()
        return begins_with(fresh.message(), message)

    if not reach(len(ids)):
        return None
    return first + bisect.bisect_left(range(first, len(ids)), True, key=reach)


def begins_with(reply: Message, message: Message) -> bool:
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
