"""The way of a request from its body to its calls: at once where it is small, else in threads.

On the event loop a megabyte of text would stop every session for seconds. So large bodies are parsed, and
long texts rendered and encoded, in threads that leave the loop its time. A session has one such piece of
work at a time: its calls are then prepared one after another, and it takes one thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from starlette.types import Receive

from tidegate.gateway.large_json import Folded
from tidegate.gateway.rendering.renderer import LargeText
from tidegate.gateway.request import RawBody, TurnRequest
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.pipeline import TurnPipeline
from tidegate.gateway.turns.prompts import Rendered
from tidegate.gateway.turns.request_body import LARGE, parse, parse_large, read_body

T = TypeVar("T")
_MOST_VALUES = 100_000
"""Values of a large body, besides the ids of a prompt that fills the context."""


class Parsed(NamedTuple):
    """A request's JSON."""

    value: dict[str, Any]
    """With marks for long strings where it is `folded`."""
    text: RawBody
    """The body, without those."""
    folded: Folded | None = None


class Threads:
    """Two pools: texts of small bodies do not wait for large bodies."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._small = ThreadPoolExecutor(max(2, min(4, cores)), "encode")
        self._large = ThreadPoolExecutor(max(1, min(2, cores - 1)), "encode-large")

    async def run(self, large: bool, work: Callable[..., T], *arguments: Any) -> T:
        pool = self._large if large else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Intake:
    """One request of a session; `async with` it, as it may hold the session's only piece of large work."""

    def __init__(self, session: GatewaySession, turns: TurnPipeline, threads: Threads) -> None:
        self._session = session
        self._turns = turns
        self._threads = threads
        self._held = False
        self._large = False

    async def __aenter__(self) -> Intake:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._held:
            self._session.preparing.release()

    async def _hold(self) -> None:
        if not self._held:
            await self._session.preparing.acquire()
            self._held = True

    async def body(self, receive: Receive) -> RawBody:
        """The request's body. Raises Refusal or ClientGone."""
        body = await read_body(receive, self._hold)
        self._large = len(body) > LARGE
        if self._large or self._session.preparing.locked():
            await self._hold()
        return body

    async def parse(self, body: RawBody) -> Parsed:
        """The body's JSON. Raises Refusal."""
        if not self._large:
            return Parsed(parse(body), body)
        context = self._turns.prompts.context
        folded = await self._threads.run(True, parse_large, body, _MOST_VALUES + (context or len(body)))
        return Parsed(folded.value, folded.text, folded)

    async def read(
        self,
        parsed: Parsed,
        read: Callable[[Any], T],
        asks: Callable[[T], Sequence[TurnRequest]],
        *,
        counts: bool = True,
    ) -> T:
        """The body as `read` understands it; raises Refusal, also for what cannot fit the context. With
        `counts` the session has outgrown it then."""
        if parsed.folded is None:
            return read(parsed.value)
        return await self._threads.run(True, self._read_large, parsed.folded, read, asks, counts)

    def _read_large(
        self,
        folded: Folded,
        read: Callable[[Any], T],
        asks: Callable[[T], Sequence[TurnRequest]],
        counts: bool,
    ) -> T:
        for ask in asks(read(folded.value)):
            self._turns.prompts.check_fits(self._session if counts else None, ask, folded)
        return read(folded.whole())

    async def call(self, ask: TurnRequest) -> PendingTurn:
        """The call that answers an ask. Raises Refusal."""
        try:
            return self._turns.call(self._session, ask, inline=not self._large)
        except LargeText:
            await self._hold()
        return self._turns.call(self._session, ask, await self._rendered(ask))

    async def _rendered(self, ask: TurnRequest) -> Rendered:
        prompts, session = self._turns.prompts, self._session
        return await self._threads.run(self._large, prompts.render, session, ask, prompts.place(session, ask))

    async def digest(self, digest: Callable[[bytes, RawBody], bytes], place: bytes, body: RawBody) -> bytes:
        if not self._large:
            return digest(place, body)
        return await self._threads.run(True, digest, place, body)

    async def count(self, ask: TurnRequest) -> int:
        """How many tokens the prompt of an ask has. Raises Refusal."""
        self._turns.check_open(self._session)
        prompts = self._turns.prompts
        try:
            if self._large:
                raise LargeText
            place = prompts.place(self._session, ask)
            rendered = prompts.render(self._session, ask, place, inline=True)
        except LargeText:
            await self._hold()
            rendered = await self._rendered(ask)
        return prompts.count(self._session, rendered)
