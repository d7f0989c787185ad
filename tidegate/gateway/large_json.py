"""Parses large JSON in pieces, so that other threads can run in between.

A parser reads a string of 20 MB in one call, during which no other thread runs. Here long strings are parsed
window by window and replaced by short placeholders in the value.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from tidegate.gateway.errors import ApiError
from tidegate.gateway.request import RawBody
from tidegate.service import exact

WINDOW = 64 * 1024
_PAUSE_S = 0.0002
"""Pause between two windows, in which the event loop runs."""
_LONG = 128
"""Strings up to this length stay in the value."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


class Folded:
    """A JSON value with placeholders for its long strings."""

    def __init__(self) -> None:
        self._prefix = (
            f"<text {secrets.token_hex(8)}:"  # random, so that no request can contain a placeholder
        )
        self._pattern = re.compile(re.escape(self._prefix) + r"\d+>")
        self._pieces: dict[str, list[str]] = {}
        self._placeholders: dict[str, str] = {}
        self.value: Any = None
        self.text: RawBody = b""
        """JSON text of `value`."""

    def placeholder(self, pieces: list[str]) -> str:
        """Returns the placeholder of a string; equal strings of one piece share it."""
        placeholder = f"{self._prefix}{len(self._pieces)}>"
        if len(pieces) == 1:
            placeholder = self._placeholders.setdefault(pieces[0], placeholder)
        self._pieces[placeholder] = pieces
        return placeholder

    def weigh(self, text: str, weight: Callable[[str], int]) -> int:
        """Sums the weights of a text's pieces, with its placeholders replaced."""
        placeholders = self._pattern.findall(text)
        rest = self._pattern.sub("", text) if placeholders else text
        return weight(rest) + sum(
            weight(piece) for placeholder in placeholders for piece in self._pieces.get(placeholder, ())
        )

    def unfold(self) -> Any:
        """Returns the original value."""
        return self._unfold(self.value) if self._pieces else self.value

    def _unfold(self, value: Any) -> Any:
        if isinstance(value, str):
            pieces = self._pieces.get(value)
            return value if pieces is None else "".join(pieces)
        if isinstance(value, list):
            return [self._unfold(item) for item in value]
        if isinstance(value, dict):
            return {self._unfold(key): self._unfold(item) for key, item in value.items()}
        return value


def fold(body: RawBody, max_values: int) -> Folded:
    """Parses JSON of any size. Raises ApiError for invalid JSON or more than `max_values` values."""
    folded = Folded()
    small = bytearray()
    values = at = 0
    while True:
        quote = body.find(b'"', at)
        stop = len(body) if quote < 0 else quote
        for start in range(at, stop, WINDOW):
            end = min(start + WINDOW, stop)
            values += sum(body.count(separator, start, end) for separator in (b",", b"[", b"{"))
            small += body[start:end]
            if values > max_values:
                raise ApiError(f"the body has more than {max_values} values; send fewer", status=413)
        if quote < 0:
            break
        end = _mask_escapes(body[quote + 1 : quote + 1 + _LONG]).find(b'"')
        if end >= 0:
            at = quote + end + 2
            small += body[quote:at]
        else:
            pieces, at = _long_string(body, quote + 1)
            small += exact.dumps(folded.placeholder(pieces))
    folded.value, folded.text = _loads(small), small
    return folded


def _mask_escapes(window: RawBody) -> RawBody:
    """Blanks escaped quotes and backslashes, so that every remaining quote ends the string."""
    if b"\\" not in window:
        return window
    return window.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")


def _long_string(body: RawBody, at: int) -> tuple[list[str], int]:
    """Parses the string whose content begins at `at`; returns its pieces and the position after its quote."""
    pieces = []
    while True:
        masked = _mask_escapes(body[at : at + WINDOW])
        size = masked.find(b'"')
        ended = size >= 0
        if not ended:
            if at + len(masked) == len(body):
                raise ApiError(f"the body is not JSON: unterminated string at byte {len(body)}")
            size = _piece_length(masked)
        pieces.append(_loads(b'"' + body[at : at + size] + b'"'))
        time.sleep(_PAUSE_S)
        at += size
        if ended:
            return pieces, at + 1


def _piece_length(masked: RawBody) -> int:
    """Returns the length of the longest piece that splits no character and no escape."""
    end = len(masked)
    escape = masked.rfind(b"\\", end - 6)
    if escape >= 0 and end - escape < (6 if masked[escape + 1 : escape + 2] == b"u" else 2):
        end = escape
    if _HIGH_SURROGATE.match(masked, end - 6):
        return end - 6  # the low surrogate follows
    for back in range(1, 4):
        first = masked[end - back]
        if first & 0xC0 == 0xC0:  # first byte of a multi-byte character
            return end - back
        if first < 0x80:
            break
    return end


def _loads(text: RawBody) -> Any:
    try:
        return exact.loads(text)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
