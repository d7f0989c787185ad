"""Keeps the tool calls of one session: the recorded ones, and those in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidegate.errors import GatewayError
from tidegate.service import exact
from tidegate.types import ToolCall

MAX_RECORDED = 64 * 2**20
"""Bytes of one session's recorded calls at which it may call no more tools."""


class KeyedCall(NamedTuple):
    """A call with an idempotency key, which a repeated request gets again."""

    name: str
    arguments: Mapping[str, Any]
    result: asyncio.Task[ToolCall] | ToolCall
    """The call in progress, or its record."""


class SessionToolCalls:
    """Tool calls of one session; idempotent by key."""

    def __init__(self) -> None:
        self.recorded: list[ToolCall] = []
        """In the order in which they ended."""
        self.size = 0
        """Bytes of the recorded calls."""
        self.numbers = 0
        """Number of the next call in the journal."""
        self.running: set[asyncio.Task[Any]] = set()
        """Tool calls, and messages to the counterpart, that are in progress."""
        self._by_key: dict[str, KeyedCall] = {}

    def find(
        self, key: str | None, name: str, arguments: Mapping[str, Any]
    ) -> asyncio.Task[ToolCall] | ToolCall | None:
        """Returns the call that a request repeats; None for a new one.

        Raises GatewayError if the key was used for another call.
        """
        earlier = None if key is None else self._by_key.get(key)
        if earlier is None:
            return None
        if (earlier.name, earlier.arguments) != (name, arguments):
            raise GatewayError("Idempotency-Key: another call was sent with it; use a new key", status=400)
        return earlier.result

    def start(self, task: asyncio.Task[Any]) -> None:
        """Keeps a task until it is done; the end of the session cancels it."""
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def start_call(
        self, task: asyncio.Task[ToolCall], key: str | None, name: str, arguments: Mapping[str, Any]
    ) -> None:
        """Keeps a tool call; requests with its key get its result, unless it fails."""
        self.start(task)
        if key is not None:
            self._by_key[key] = KeyedCall(name, arguments, task)
            task.add_done_callback(lambda _: self._settle(key, task))

    def _settle(self, key: str, task: asyncio.Task[ToolCall]) -> None:
        if task.cancelled() or task.exception() is not None:
            # A failed call has no record: its retry runs the tool again.
            del self._by_key[key]
        else:
            call = task.result()
            self._by_key[key] = KeyedCall(call.name, self._by_key[key].arguments, call)

    def add(self, call: ToolCall) -> None:
        """Adds a call that is in the journal."""
        self.recorded.append(call)
        self.size += len(exact.pack(call))

    def restore(self, number: int, call: ToolCall, key: str | None) -> None:
        """Adds a call from the journal."""
        self.add(call)
        self.numbers = number + 1
        if key is not None:
            self._by_key[key] = KeyedCall(call.name, call.arguments, call)

    def cancel_all(self) -> None:
        """Cancels the calls in progress."""
        for task in list(self.running):
            task.cancel()
