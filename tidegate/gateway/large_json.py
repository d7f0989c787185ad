"""Large JSON read in pieces: its long strings apart, a window at a time, the rest as a small value.

The library reads a string of 20 MB in one call, during which no other thread of the process runs. Here long
strings are read window by window, and a short mark stands for each of them in the value.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import orjson

from tidegate.gateway.errors import ApiError
from tidegate.gateway.request import RawBody

WINDOW = 64 * 1024
_PAUSE_S = 0.0002
"""Between two windows: the event loop need not ask for its turn."""
_LONG = 128
"""Shorter strings stay in the value."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


class Folded:
    """A JSON value with marks for its long strings."""

    def __init__(self) -> None:
        self._prefix = f"<text {secrets.token_hex(8)}:"  # nobody can write the marks of another request
        self._marks = re.compile(re.escape(self._prefix) + r"\d+>")
        self._pieces: dict[str, list[str]] = {}
        self._known: dict[str, str] = {}
        self.value: Any = None
        self.text: RawBody = b""
        """The JSON of the value."""

    def mark(self, pieces: list[str]) -> str:
        """What stands for a string; the same for the same one, as far as it has one piece."""
        mark = f"{self._prefix}{len(self._pieces)}>"
        if len(pieces) == 1:
            mark = self._known.setdefault(pieces[0], mark)
        self._pieces[mark] = pieces
        return mark

    def weigh(self, text: str, weight: Callable[[str], int]) -> int:
        """The weights of the pieces of a text that may have marks in it, together."""
        marks = self._marks.findall(text)
        rest = self._marks.sub("", text) if marks else text
        return weight(rest) + sum(weight(piece) for mark in marks for piece in self._pieces.get(mark, ()))

    def whole(self) -> Any:
        """The value as it came."""
        return self._unfolded(self.value) if self._pieces else self.value

    def _unfolded(self, value: Any) -> Any:
        if isinstance(value, str):
            pieces = self._pieces.get(value)
            return value if pieces is None else "".join(pieces)
        if isinstance(value, list):
            return [self._unfolded(one) for one in value]
        if isinstance(value, dict):
            return {self._unfolded(key): self._unfolded(one) for key, one in value.items()}
        return value


def fold(body: RawBody, most_values: int) -> Folded:
    """Read JSON of any size. Raises Refusal where it is none, or has more than `most_values` values."""
    folded = Folded()
    small = bytearray()
    values = at = 0
    while True:
        quote = body.find(b'"', at)
        stop = len(body) if quote < 0 else quote
        for start in range(at, stop, WINDOW):
            end = min(start + WINDOW, stop)
            values += sum(body.count(one, start, end) for one in (b",", b"[", b"{"))
            small += body[start:end]
            if values > most_values:
                raise ApiError(f"the body has more than {most_values} values; send fewer", status=413)
        if quote < 0:
            break
        end = _plain(body[quote + 1 : quote + 1 + _LONG]).find(b'"')
        if end >= 0:
            at = quote + end + 2
            small += body[quote:at]
        else:
            pieces, at = _long_string(body, quote + 1)
            small += orjson.dumps(folded.mark(pieces))
    folded.value, folded.text = _loads(small), small
    return folded


def _plain(window: RawBody) -> RawBody:
    """A part of a string's inside, as long as it was, in which every quote ends the string."""
    if b"\\" not in window:
        return window
    return window.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")


def _long_string(body: RawBody, at: int) -> tuple[list[str], int]:
    """The pieces of a string whose inside begins at `at`, and where it ends, its quote included."""
    pieces = []
    while True:
        plain = _plain(body[at : at + WINDOW])
        size = plain.find(b'"')
        ended = size >= 0
        if not ended:
            if at + len(plain) == len(body):
                raise ApiError(f"the body is not JSON: a string breaks off at its end, byte {len(body)}")
            size = _cut(plain)
        pieces.append(_loads(b'"' + body[at : at + size] + b'"'))
        time.sleep(_PAUSE_S)
        at += size
        if ended:
            return pieces, at + 1


def _cut(plain: RawBody) -> int:
    """How much of a window is a piece of its own: no character and no escape is cut in two."""
    end = len(plain)
    escape = plain.rfind(b"\\", end - 6)
    if escape >= 0 and end - escape < (6 if plain[escape + 1 : escape + 2] == b"u" else 2):
        end = escape
    if _HIGH_SURROGATE.match(plain, end - 6):
        return end - 6  # its other half follows
    for back in range(1, 4):
        first = plain[end - back]
        if first & 0xC0 == 0xC0:  # a character of several bytes begins here
            return end - back
        if first < 0x80:
            break
    return end


def _loads(text: RawBody) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
