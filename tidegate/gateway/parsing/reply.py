"""Turns sampled ids into text truncated at stop strings, reasoning and tool calls.

Streamed and complete replies use the same pipeline, so the recorded reply equals the streamed one. Parsers
take text incrementally and return content and calls as soon as they are certain. A malformed or unclosed call
stays content, which `status` reports. Tool-call formats are in `tidegate.gateway.parsing.tool_calls`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tidegate.gateway.ids import unique_name

if TYPE_CHECKING:  # the settings import this module, and nothing heavy
    from tidegate.types import Message

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
Decode = Callable[[Sequence[int]], str]
UNFINISHED = "�"
"""The decoded form of an incomplete UTF-8 character."""
_LONGEST_CHARACTER = 4  # ids; the most bytes of a UTF-8 character
_WINDOW = 6  # ids of context needed to decode the next ids as within the complete text


class SampledCall(NamedTuple):
    """A parsed call; `arguments` is JSON text, as in the OpenAI API."""

    name: str
    arguments: str


class Reasoning(NamedTuple):
    """A piece of the model's reasoning."""

    text: str


Part = str | Reasoning | SampledCall
"""A piece of content, a piece of reasoning, or a complete call."""


class ReplyParser(Protocol):
    """Parses one reply incrementally."""

    @property
    def status(self) -> str | None:
        """The result of parsing the calls, see `Turn.parse`."""

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain now."""

    def finish(self) -> list[Part]:
        """End the text; returns the remaining parts."""


class ToolUse(NamedTuple):
    """The tool choice of a request; `name` is the tool that the reply must call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


class PlainParser:
    """Returns all text as content."""

    def __init__(self) -> None:
        self.status: str | None = None

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


def call_wire(key: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in the form of the OpenAI API (arguments as text) or of chat templates (a dict)."""
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str, **types: str) -> dict[str, Any]:
    """Returns the definition of a tool; `types` are the JSON types of its parameters."""
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


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


class ReasoningParser:
    """Splits off reasoning in `<think>…</think>` and passes the text after it to the parser of the answer.

    Some templates end the prompt with `<think>`, so the reply may start inside the block. Text after an
    unclosed `<think>` is reasoning to the end of the reply. Whitespace around reasoning is dropped.
    """

    def __init__(self, answer: ReplyParser, opened: bool = False) -> None:
        self._answer = answer
        self._opened = opened
        self._at: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._held = ""  # a possible prefix of a marker, or whitespace that may be dropped
        self._any_reasoning = False

    @property
    def status(self) -> str | None:
        return self._answer.status

    def feed(self, text: str) -> list[Part]:
        if self._at == "answer":
            return self._answer.feed(text)
        text, self._held = self._held + text, ""
        if self._at == "start":
            return self._start(text)
        return self._reasoning(text) if self._at == "reasoning" else self._gap(text)

    def finish(self) -> list[Part]:
        rest, self._held = self._held, ""
        if self._at == "reasoning" or (self._at == "start" and self._opened):
            return [*self._reasoning_part(rest.rstrip()), *self._answer.finish()]
        return [*self._answer.feed(rest), *self._answer.finish()]

    def _start(self, text: str) -> list[Part]:
        """Text before it is certain whether the reply begins with reasoning."""
        solid = text.lstrip()
        if len(solid) < len(THOUGHT_START) and THOUGHT_START.startswith(solid):
            self._held = text
            return []
        if self._opened or solid.startswith(THOUGHT_START):
            self._at = "reasoning"
            return self._reasoning(solid.removeprefix(THOUGHT_START))
        self._at = "answer"
        return self._answer.feed(text)

    def _reasoning(self, text: str) -> list[Part]:
        reasoning, closed, after = text.partition(THOUGHT_END)
        if closed:
            self._at = "gap"
            return [*self._reasoning_part(reasoning.rstrip()), *self._gap(after)]
        certain = text[: len(text) - partial_suffix(text, THOUGHT_END)].rstrip()
        self._held = text[len(certain) :]
        return self._reasoning_part(certain)

    def _gap(self, text: str) -> list[Part]:
        text = text.lstrip()
        if not text:
            return []
        self._at = "answer"
        return self._answer.feed(text)

    def _reasoning_part(self, text: str) -> list[Part]:
        text = text if self._any_reasoning else text.lstrip()
        self._any_reasoning = self._any_reasoning or bool(text)
        return [Reasoning(text)] if text else []


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


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    first, least = marker[0], max(0, len(text) - len(marker) + 1)
    at = text.find(first, least)
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(first, at + 1)
    return 0


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Returns the position of the first marker in a text, and the marker; without one, the number of
    characters before a possible beginning of one, and None."""
    matches = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if matches:
        return min(matches)
    return len(text) - max((partial_suffix(text, marker) for marker in markers), default=0), None
