"""Turns sampled ids into text truncated at stop strings, reasoning and tool calls.

Streamed and complete replies use the same pipeline, so the recorded reply equals the streamed one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from tidegate.gateway.ids import unique_name
from tidegate.gateway.parsing.parts import Part, Reasoning, ReplyParser, SampledCall, call_wire, find_first
from tidegate.gateway.parsing.reasoning import ReasoningParser
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
    """Passes text up to the first stop string to the parser of the answer; holds back a possible beginning
    of one."""

    def __init__(self, answer: ReplyParser) -> None:
        self._answer = answer
        self._stops: list[str] = []
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    @property
    def status(self) -> str | None:
        return self._answer.status

    def use(self, stops: Sequence[str]) -> None:
        """Sets the stop strings of the text that follows."""
        self._stops = [stop for stop in stops if stop]

    def feed(self, text: str) -> list[Part]:
        if self.stopped:
            return []
        text = self._held + text
        certain, self.stopped = find_first(text, self._stops)
        self._held = text[certain:] if self.stopped is None else ""
        return self._answer.feed(text[:certain])

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        return [*self._answer.feed(held), *self._answer.finish()]


class ReplyReader:
    """Parses one reply; `parts` grows as ids arrive.

    Args:
        decode: Returns the text of ids.
        stops: Strings that end the answer. They do not end reasoning, which may quote them.
        answer: Parser of the answer.
        prefill: Text at the end of the prompt that belongs to the reply.
        thought: None if the model does not reason with markers; else whether the prompt opens a section.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str],
        answer: ReplyParser,
        prefill: str = "",
        thought: bool | None = None,
    ) -> None:
        self._text = Detokenizer(decode)
        self.thought = None if prefill else thought  # the prefill begins the answer
        self._cut = StopCutter(answer)
        self._parser: ReplyParser = self._cut if thought is None else ReasoningParser(self._cut, thought)
        self.parts: list[Part] = []
        self.call_ids: list[str] = []
        self.part_ends: list[int] = []
        """For each part, the number of ids when it became certain."""
        self.seen = 0
        self.prefill = prefill
        self._add(self._parser.feed(prefill))
        self._cut.use(stops)

    def push(self, ids: Sequence[int]) -> None:
        """Add the ids that follow the first `seen` ones."""
        self.seen += len(ids)
        self._add(self._parser.feed(self._text.push(ids)))

    def finish(self) -> None:
        self._add(self._parser.feed(self._text.finish()))
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


def stop_search(new_reader: Callable[[], ReplyReader]) -> Callable[[Sequence[int]], int | None]:
    """Returns a search in one reply whose ids arrive in pieces: called with all ids so far, it returns their
    number up to the end of the first stop string, None without one."""
    reader = new_reader()

    def stopped(ids: Sequence[int]) -> bool:
        fresh = new_reader()
        fresh.push(ids)
        return fresh.stopped is not None

    def search(ids: Sequence[int]) -> int | None:
        reader.push(ids[reader.seen :])
        if reader.stopped is None:
            return None
        return bisect.bisect_left(range(len(ids)), True, key=lambda count: stopped(ids[:count]))

    return search


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
