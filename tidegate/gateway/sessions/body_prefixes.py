"""Recognises request bodies that repeat an earlier one of their session, so that a history is parsed once.

An agent sends its whole conversation with every request, a few messages longer. A body that begins like an
earlier one, up to the end of the messages there, is recognised by the digest of its beginning. This digest is
a by-product of the digest of the whole body, which is needed anyway to recognise retries. Then only the rest
is parsed, and the earlier messages are the same objects as before, which compares them at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tidegate.gateway.errors import ApiError

MIN_BODY = 8 * 1024
"""Shorter bodies, in bytes, are parsed in full, which costs less than to recognise them."""
MAX_SCAN = 2 * 2**20
"""Longer bodies, in bytes, are remembered only if they extend one that is: finding the end of their messages
would block other threads."""
_KEPT = 4
"""Prefixes of a session: those of its parallel conversations."""
_WHITESPACE = b" \t\r\n"


class _Prefix(NamedTuple):
    end: int
    """Bytes of a body up to the end of its last message."""
    head: bytes
    """The body's text up to the bracket that opens its messages."""
    digest: bytes
    messages: list[Any]


class RepeatedBody(NamedTuple):
    """A body that begins with the messages of an earlier one."""

    rest: bytes
    """JSON of the body without these messages."""
    messages: list[Any]
    head: int
    """Bytes of `rest` up to the bracket that opens the messages."""
    skipped: int
    """Bytes that the body has and `rest` has not."""
    end: int
    """Bytes of the body up to the end of these messages."""
    state: Any
    """The state of the body's digest after `end` bytes."""


class BodyPrefixes:
    """The beginnings of a session's newest bodies. Its methods must not run concurrently."""

    def __init__(self) -> None:
        self._newest: list[_Prefix] = []

    def find(self, position: bytes, body: bytes | bytearray) -> RepeatedBody | None:
        """Returns what a body adds to an earlier one; None if it repeats none.

        Args:
            position: What the digest of a body begins with.
            body: The body.
        """
        state, at = blake2b(position, digest_size=16), 0
        found: tuple[_Prefix, Any] | None = None
        with memoryview(body) as view:
            for prefix in sorted(self._newest, key=lambda one: one.end):
                if prefix.end > len(body):
                    break
                state.update(view[at : prefix.end])
                at = prefix.end
                if state.digest() == prefix.digest:
                    # A copy, as the loop goes on with this state to look for a longer prefix.
                    found = prefix, state.copy()
        return None if found is None else _repeated(*found, body)

    def read(
        self, repeated: RepeatedBody, body: bytes | bytearray, parse: Callable[[bytes], dict[str, Any]]
    ) -> tuple[dict[str, Any], bytes] | None:
        """Parses what a body adds, and remembers the body.

        Returns:
            The whole body's value and digest; None if the body must be parsed in full, as invalid ones.
        """
        try:
            value = parse(repeated.rest)
        except ApiError:
            return None
        new, span = value.get("messages"), _messages_span(repeated.rest)
        if not isinstance(new, list) or span is None or span[0] != repeated.head:
            return None  # a second list of messages, which replaces the first
        value["messages"] = messages = [*repeated.messages, *new]
        end = max(repeated.end, _trimmed(body, span[1] + repeated.skipped))
        digest = self._add(body, end, repeated.rest[: repeated.head], messages, repeated.state, repeated.end)
        return value, digest

    def remember(self, position: bytes, body: bytes | bytearray, value: dict[str, Any]) -> bytes:
        """Remembers a body that was parsed in full; returns its digest."""
        state, messages = blake2b(position, digest_size=16), value.get("messages")
        span = _messages_span(bytes(body)) if messages and len(body) <= MAX_SCAN else None
        if span is None or not isinstance(messages, list):
            state.update(body)
            return state.digest()
        return self._add(body, _trimmed(body, span[1]), bytes(body[: span[0]]), messages, state, 0)

    def clear(self) -> None:
        self._newest = []

    def _add(
        self, body: bytes | bytearray, end: int, head: bytes, messages: list[Any], state: Any, at: int
    ) -> bytes:
        """Adds a prefix; `state` is that of the body's digest after `at` bytes. Returns the digest."""
        with memoryview(body) as view:
            state.update(view[at:end])
            prefix = _Prefix(end, head, state.digest(), messages)
            state.update(view[end:])
        self._newest = [prefix, *(one for one in self._newest if one.digest != prefix.digest)][:_KEPT]
        digest: bytes = state.digest()
        return digest


def _repeated(prefix: _Prefix, state: Any, body: bytes | bytearray) -> RepeatedBody | None:
    rest = bytes(body[prefix.end :]).lstrip(_WHITESPACE)
    if rest.startswith(b","):
        rest = rest[1:].lstrip(_WHITESPACE)
        if rest.startswith(b"]"):
            return None  # a trailing comma is invalid
    elif not rest.startswith(b"]"):
        return None
    text, skipped = prefix.head + rest, len(body) - len(rest) - len(prefix.head)
    return RepeatedBody(text, prefix.messages, len(prefix.head), skipped, prefix.end, state)


def _trimmed(body: bytes | bytearray, end: int) -> int:
    while body[end - 1] in _WHITESPACE:
        end -= 1
    return end


class _Messages(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Messages)


def _messages_span(text: bytes) -> tuple[int, int] | None:
    """Returns the offsets after the bracket that opens the messages and of the one that closes them; None if
    the text has no list of messages."""
    try:
        raw = _decoder.decode(text).messages
    except (msgspec.DecodeError, RecursionError):
        return None
    size = len(memoryview(raw))
    if size == 0 or memoryview(raw)[0] != ord("["):
        return None
    start = _address(raw) - _address(text)  # it is a view of the text
    if not 0 <= start <= len(text) - size:
        return None
    return start + 1, start + size - 1


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
