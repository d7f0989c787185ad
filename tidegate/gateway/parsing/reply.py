"""From sampled ids to what the client reads: text, cut at stop strings, read for tool calls.

One pipeline serves streamed and whole replies, so that what was streamed is what is recorded.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from tidegate.gateway.ids import unique_name
from tidegate.gateway.parsing.parts import Part, Reasoning, ReplyParser, ToolCall
from tidegate.gateway.rendering.messages import meaning, template_form
from tidegate.types import Message

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "�"
"""What decoding gives for bytes of a character whose rest is still to come."""
_LONGEST_CHARACTER = 4  # ids: no character has more bytes in UTF-8
_WINDOW = 6  # ids of context that make the next ids decode as they would within the whole


class Detokenizer:
    """Decodes ids as they come, without ever splitting a character."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the context
        self._done = 0  # ids whose text was given

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now; what may be the beginning of a character waits."""
        self._ids.extend(ids)
        for held in range(_LONGEST_CHARACTER):
            end = len(self._ids) - held
            if end <= self._done:
                return ""
            text = self._fresh(end)
            if not text.endswith(UNFINISHED):
                break
        # Else these bytes are no character at all: only the last ones can still become one.
        self._start = max(self._start, end - _WINDOW)
        self._done = end
        return text

    def finish(self) -> str:
        """The rest, unfinished characters included."""
        if self._done == len(self._ids):
            return ""
        text = self._fresh(len(self._ids))
        self._done = len(self._ids)
        return text

    def _fresh(self, end: int) -> str:
        if self._done == 0:
            return self._decode(self._ids[:end])
        known = self._decode(self._ids[self._start : self._done])
        return self._decode(self._ids[self._start : end])[len(known) :]


class StopCutter:
    """Lets text through up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def stop_after(decode: Decode, stops: Sequence[str], ids: Sequence[int]) -> int | None:
    """How many ids there are up to the end of the first stop string in their text; None: there is none."""

    def stopped(size: int) -> bool:
        text = decode(ids[:size])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return None
    return bisect.bisect_left(range(len(ids)), True, key=stopped)


class ReplyReader:
    """The pipeline of one reply; `parts` grows as ids arrive.

    `begun` is text that the prompt ends with and that belongs to the reply.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], parser: ReplyParser, begun: str = "") -> None:
        self._text = Detokenizer(decode)
        self._cut = StopCutter(stops)
        self._parser = parser
        self.parts: list[Part] = []
        self.call_ids: list[str] = []
        self.ends: list[int] = []
        """For each part how many ids had come when it was given."""
        self.seen = 0
        self.begun = begun
        self._add(parser.feed(begun))

    def push(self, ids: Sequence[int]) -> None:
        """More of the reply's ids, those that come after the `seen` ones."""
        self.seen += len(ids)
        self._add(self._parser.feed(self._cut.feed(self._text.push(ids))))

    def finish(self) -> None:
        rest = self._cut.feed(self._text.finish()) + self._cut.finish()
        self._add(self._parser.feed(rest))
        self._add(self._parser.finish())

    def _add(self, parts: list[Part]) -> None:
        self.parts += parts
        self.ends += [self.seen] * len(parts)
        self.call_ids += [f"call_{unique_name()[:24]}" for part in parts if isinstance(part, ToolCall)]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended it."""
        return self._cut.stopped

    @property
    def status(self) -> str | None:
        return self._parser.status

    def keep(self, count: int) -> None:
        """Forget all but the first `count` parts."""
        del self.parts[count:], self.ends[count:]
        del self.call_ids[sum(isinstance(part, ToolCall) for part in self.parts) :]

    def message(self) -> Message:
        """The reply as an OpenAI message."""
        content = "".join(part for part in self.parts if isinstance(part, str))
        calls = [part for part in self.parts if isinstance(part, ToolCall)]
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


def read_through(
    reader: Callable[[], ReplyReader], ids: Sequence[int], message: Message, first: int = 0
) -> int | None:
    """How many of a reply's ids a client has read that has `message` of it, `first` at least.

    None where the reply does not begin so. `reader` makes a reader of such replies.
    """

    def reach(count: int) -> bool:
        fresh = reader()
        fresh.push(ids[:count])
        fresh.finish()
        return begins_with(fresh.message(), message)

    if not reach(len(ids)):
        return None
    return first + bisect.bisect_left(range(first, len(ids)), True, key=reach)


def begins_with(reply: Message, message: Message) -> bool:
    """Whether an assistant's `message` is the beginning of its `reply`."""
    whole, begun = template_form(reply, 0), template_form(message, 0)
    for name in ("content", "reasoning_content"):
        if not whole.get(name, "").lstrip().startswith(begun.get(name, "").lstrip()):
            return False
    calls = begun.get("tool_calls", [])
    return _calls(whole.get("tool_calls", [])[: len(calls)]) == _calls(calls)


def _calls(calls: list[Any]) -> bytes:
    return meaning({"role": "assistant", "content": "", "tool_calls": calls})


def call_wire(key: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
