"""Defines tool-call formats, and the parser that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.gateway.errors import unsupported
from tidegate.gateway.parsing.reply import Part, ReplyParser, SampledCall, ToolUse, find_first

Tools = Sequence[Any]
"""The tools of a request, in the format of Chat Completions."""
Read = Callable[[str, Tools], list[SampledCall] | None]
"""Reads the calls in a block's text; returns None if it is malformed."""
Quotes = Callable[[str, int], int]
"""Adds a piece of a block's text to the number of arguments that are open at its end: unless the number is 0,
an end marker after it is a part of an argument."""


def in_json_string(piece: str, opened: int) -> int:
    """`Quotes` of JSON: whether a string is open."""
    return opened ^ piece.replace("\\\\", "").replace('\\"', "").count('"') % 2


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The tool-call format of a model family.

    `markers` are its special tokens, which must stay visible in decoded text. `forced(name)` returns the text
    that starts a reply with a call of the tool `name` (None: any tool), up to a token boundary of the model.
    `call_end` is the text after a call, at which the reply can be stopped. Either is None if the format has
    no such text.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[Tools], ReplyParser]
    forced: Callable[[str | None], str] | None = None
    call_end: str | None = None


def forced_start(tool_format: ToolCallFormat, use: ToolUse) -> str:
    """The text that forces a reply to start with a call; empty if no call is required. Raises ApiError if the
    format cannot force a call."""
    if use.mode != "required":
        return ""
    if tool_format.forced is None:
        raise unsupported("tool_choice", "only 'auto' and 'none' are supported with this model's tool calls")
    return tool_format.forced(use.name)


def single_call_stop(tool_format: ToolCallFormat, use: ToolUse) -> str | None:
    """The stop string that limits a reply to one call; None if parallel calls are allowed. Raises ApiError if
    the format has no such text."""
    if use.parallel or use.mode == "none":
        return None
    if tool_format.call_end is None:
        raise unsupported("parallel_tool_calls", "false is not supported with this model's tool calls")
    return tool_format.call_end


class BlockParser:
    """Parses blocks from `opening` to `closing`, or if that is None to the next block or the end. `section`
    are markers around several blocks. These markers and whitespace between content and a call are dropped. A
    block that `read` rejects, or that is never closed, stays content.

    An end marker within an argument (`quotes`), or not after the end of a `frame` that the block begins, ends
    the block only if no later one does: then the arguments were malformed.
    """

    def __init__(
        self,
        read: Read,
        tools: Tools,
        opening: str,
        closing: str | None = None,
        section: tuple[str, str] | None = None,
        quotes: Quotes = in_json_string,
        frame: tuple[str, str] = ("", ""),
    ) -> None:
        self.status: str | None = None
        self._read = read
        self._tools = tools
        self._opening = opening
        self._closing = closing
        self._section = section
        self._markers = (opening, *(section or ()))
        self._buffer = ""
        self._quotes = quotes
        self._frame = frame
        self._searched = 0  # characters of the block already searched for its end
        self._counted = self._opened = 0  # characters that `quotes` has read, and its result
        self._skipped: list[int] = []  # end markers that seemed to be within an argument
        self._blank = ""  # whitespace and markers, content only if content follows
        self._inside = False
        self._called = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._within(parts) if self._inside else self._between(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._inside:
            if self._closing is None and (not self._skipped or self._read(self._buffer, self._tools)):
                self._block(parts, self._buffer)
                self._buffer, self._inside = "", False
            elif self._skipped:
                self._end_early(parts)
                parts += self.feed("")
            else:
                self._malformed(parts, self._opening + self._buffer)
                self._buffer, self._inside = "", False
        rest, self._buffer = self._buffer, ""
        self._content(parts, rest)
        if self._blank and not self._called:
            if self._blank.strip():
                self.status = "malformed"  # a section without a call
            parts.append(self._blank)
        self._blank = ""
        return parts

    def _between(self, parts: list[Part]) -> bool:
        """Consume the buffer up to the next marker; whether there may be more to consume."""
        at, marker = find_first(self._buffer, self._markers)
        self._content(parts, self._buffer[:at])
        self._buffer = self._buffer[at + len(marker or "") :]
        if marker == self._opening:
            self._inside = True
            self._begin()
        elif marker and (not self._called or (self._section is not None and marker == self._section[0])):
            self._blank += marker
        return marker is not None

    def _within(self, parts: list[Part]) -> bool:
        """Consume a block if it is complete; whether there may be more to consume."""
        end = self._closing or self._opening
        while (at := self._buffer.find(end, self._searched)) >= 0:
            self._opened = self._quotes(self._buffer[self._counted : at], self._opened)
            self._counted, self._searched = at, at + len(end)
            if self._opened or self._framed(at):
                self._skipped.append(at)
            elif self._skipped and not self._read(self._buffer[:at], self._tools):
                self._end_early(parts)
                return True
            else:
                self._end_at(parts, at)
                return True
        self._searched = max(self._searched, len(self._buffer) - len(end) + 1)
        return False

    def _framed(self, at: int) -> bool:
        begin, end = self._frame
        return begin in self._buffer[:at] and not self._buffer[:at].rstrip().endswith(end)

    def _begin(self) -> None:
        """Starts at the beginning of a block."""
        self._searched = self._counted = self._opened = 0
        self._skipped = []

    def _end_early(self, parts: list[Part]) -> None:
        """Ends a block at the first skipped marker that makes it a call, or at the first one."""
        skipped = self._skipped
        self._end_at(
            parts, next((at for at in skipped if self._read(self._buffer[:at], self._tools)), skipped[0])
        )

    def _end_at(self, parts: list[Part], at: int) -> None:
        block, self._buffer = self._buffer[:at], self._buffer[at + len(self._closing or self._opening) :]
        self._block(parts, block)
        self._inside = self._closing is None  # without a closing marker, the next block has begun
        self._begin()

    def _block(self, parts: list[Part], text: str) -> None:
        calls = self._read(text, self._tools)
        if not calls:
            self._malformed(parts, self._opening + text + (self._closing or ""))
            return
        for marker in self._section or ():
            self._blank = self._blank.replace(marker, "")
        self._called = True
        self.status = self.status or "ok"
        parts += calls

    def _content(self, parts: list[Part], text: str) -> None:
        solid = text.rstrip()
        if solid:
            parts.append(self._blank + solid)
            self._blank = text[len(solid) :]
        else:
            self._blank += text

    def _malformed(self, parts: list[Part], text: str) -> None:
        self.status = "malformed"
        self._content(parts, text)
