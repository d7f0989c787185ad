"""Reads request bodies, with limits on size, time and depth, and prepares their calls.

Small bodies are handled on the event loop. There a megabyte of text would block all sessions for seconds, so
large bodies are parsed, and long texts rendered and encoded, in threads. A session uses at most one thread
and prepares its large requests one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.types import Message, Receive

from tidegate.gateway.errors import ApiError
from tidegate.gateway.rendering.renderer import LargeText
from tidegate.gateway.sessions.body_prefixes import MIN_BODY
from tidegate.gateway.sessions.model_calls import ModelCall, RawBody, TurnRequest, digest_of
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.pipeline import TurnPipeline
from tidegate.gateway.turns.prompts import PolicyRoute, PromptBuilder, Rendered
from tidegate.service import exact

MAX_BODY = 64 * 2**20
MAX_BODY_LEVELS = exact.MAX_LEVELS + 20
"""Levels of a request body, which contains a tool call's arguments within messages."""
SMALL_BODY = 2**20
"""Limit of the bodies of routes that need no text of a model."""
HELD_BODIES = MAX_BODY
"""Limit of the bytes of bodies that are read at one time for one project key or session."""
MAX_VALUES = 1_000_000
"""Values in a large body of which nothing else is known."""
BODY_S = 60.0
"""Seconds in which a client must send its body."""
LARGE = 256 * 1024
"""Bytes beyond which a body is parsed in a thread, one at a time per session."""


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


class HeldBodies:
    """Counts the bytes of the bodies that are read at one time, by project key or session.

    So nobody can make the gateway hold as many bodies of MAX_BODY bytes as there are connections.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, flow: str, receive: Receive) -> Iterator[Receive]:
        """Yields a `receive` whose bytes count against HELD_BODIES until the end of the context.

        Beyond the limit it raises ApiError (429).
        """
        own = 0

        async def counting() -> Message:
            nonlocal own
            message = await receive()
            if size := len(message.get("body", b"")):
                if self._held[flow] + size > HELD_BODIES:
                    raise ApiError(
                        f"bodies of {self._held[flow]} bytes are being read for this key, and the limit is "
                        f"{HELD_BODIES}; send fewer large requests at one time",
                        status=429,
                        type="too_many_large_bodies",
                        code="too_many_large_bodies",
                        retryable=True,
                    )
                own += size
                self._held[flow] += size
            return message

        try:
            yield counting
        finally:
            self._held[flow] -= own
            if not self._held[flow]:
                del self._held[flow]


async def read_body(
    receive: Receive, large: Callable[[], Awaitable[None]] | None = None, *, small: bool = False
) -> RawBody:
    """Reads a complete body; `large` is awaited before more than about LARGE bytes are read.

    With `small`, the limit is SMALL_BODY. Raises ApiError if the body is too large or too slow, ClientGone if
    the client disconnects.
    """
    limit = SMALL_BODY if small else MAX_BODY
    try:
        async with asyncio.timeout(BODY_S) as timeout:
            message = await receive()
            body = bytearray()
            while True:
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                # The usual body comes in one message, and needs no copy.
                if not message.get("more_body") and not body:
                    return chunk
                body += chunk
                if not message.get("more_body"):
                    return body
                if large is not None and len(body) > LARGE:
                    # The wait for the session's other large requests is not the client's delay.
                    timeout.reschedule(None)
                    await large()
                    timeout.reschedule(asyncio.get_running_loop().time() + BODY_S)
                    large = None
                message = await receive()
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {BODY_S:g} s", status=408, type="timeout", retryable=True
        ) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the body is larger than {limit} bytes", status=413)


def parse(body: RawBody) -> dict[str, Any]:
    """Parses a body. Raises ApiError unless it is a JSON object."""
    try:
        payload = exact.loads(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ApiError("the body is not a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_BODY_LEVELS and exact.too_deep(payload, MAX_BODY_LEVELS):
        raise ApiError(f"the body is nested more than {MAX_BODY_LEVELS} levels deep; send flatter JSON")
    return payload


def parse_large(body: RawBody, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parses a large body, in a thread. Raises as `parse` does, and for more than `max_values` values."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Otherwise it has too many values even without what looks like one in a string.
    if bare.count(b'"') <= 4 * max_values:
        bare = b"".join(bare.split(b'"')[::2])  # the text outside of strings
    if sum(map(bare.count, (b",", b"[", b"{"))) > max_values:
        raise ApiError(f"the body has more than {max_values} values; send fewer", status=413)
    return parse(body)


T = TypeVar("T")
_PROMPT_VALUES = 100_000
"""Values in a large body, excluding the ids of a prompt that fills the context."""


class Threads:
    """Two thread pools, so that small bodies do not queue behind large ones."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._small = ThreadPoolExecutor(max(2, min(4, cores)), "encode")
        # A core is left for the event loop.
        self._large = ThreadPoolExecutor(max(1, min(2, cores - 1)), "encode-large")

    async def run(self, large: bool, work: Callable[..., T], *arguments: Any) -> T:
        pool = self._large if large else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def close(self) -> None:
        for pool in (self._small, self._large):
            # Encoding a long text takes seconds, and nobody waits for its result any more.
            pool.shutdown(wait=False, cancel_futures=True)


class RequestReader:
    """Reads one request of a session. An async context manager, as it may hold the session's prepare lock."""

    def __init__(self, session: GatewaySession, turns: TurnPipeline, threads: Threads) -> None:
        self._session = session
        self._turns = turns
        self._prompts = next(iter(turns.prompts.values()))
        self._threads = threads
        self._locked = False
        self._large = False
        self._store_prefix: Callable[[Any], bytes] | None = None
        """Stores the value of the body for later ones, and returns its digest."""
        self._first_digest: bytes | None = None

    async def __aenter__(self) -> RequestReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._locked:
            self._session.prepare_lock.release()

    def choose(self, prompts: PromptBuilder) -> PolicyRoute:
        """Sets the policy that the request names, before it is read."""
        self._prompts = prompts
        return prompts.policy

    async def _lock(self) -> None:
        if not self._locked:
            await self._session.prepare_lock.acquire()
            self._locked = True

    async def body(self, receive: Receive) -> RawBody:
        """Reads the request's body. Raises ApiError or ClientGone."""
        body = await read_body(receive, self._lock)
        self._large = len(body) > LARGE
        if self._large or self._session.prepare_lock.locked():
            await self._lock()
        return body

    async def parse(self, body: RawBody, position: bytes | None = None) -> dict[str, Any]:
        """Parses the body. Raises ApiError.

        With `position`, that of the request's first reply, a body that begins like an earlier one of the
        session is parsed from the first difference.
        """
        if position is None or len(body) < MIN_BODY or self._session.closed is not None:
            return await self._parse(body)
        prefixes = self._session.body_prefixes
        if self._large:
            repeated = await self._threads.run(True, prefixes.find, position, body)
        else:
            repeated = prefixes.find(position, body)
        if repeated is not None and len(repeated.rest) <= LARGE:
            found = prefixes.read(repeated, body, parse)
            if found is not None:
                self._large = False
                value, self._first_digest = found
                return value
        self._store_prefix = partial(prefixes.remember, position, body)
        return await self._parse(body)

    async def _parse(self, body: RawBody) -> dict[str, Any]:
        if not self._large:
            return parse(body)
        context = max(prompts.context or len(body) for prompts in self._turns.prompts.values())
        return await self._threads.run(True, parse_large, body, _PROMPT_VALUES + context)

    async def read(
        self,
        value: dict[str, Any],
        read: Callable[[Any], T],
        turn_requests: Callable[[T], Sequence[TurnRequest]],
        *,
        record_overflow: bool = True,
    ) -> T:
        """Translates the body with `read`. Raises ApiError, also for prompts that exceed the context. With
        `record_overflow`, the session records that its history exceeds the context."""
        session = self._session if record_overflow else None

        def read_noted() -> T:
            if self._store_prefix is not None:
                self._first_digest = self._store_prefix(value)
            result = read(value)
            if self._large:
                for request in turn_requests(result):
                    self._prompts.check_fits(session, request)
            return result

        return await self._threads.run(True, read_noted) if self._large else read_noted()

    async def call(self, request: TurnRequest) -> ModelCall:
        """Returns the call for a request. Raises ApiError."""
        try:
            return self._turns.call(self._session, request, inline=not self._large)
        except LargeText as error:
            branch_reason = error.branch_reason
            await self._lock()
        return self._turns.call(self._session, request, await self._render_in_thread(request, branch_reason))

    async def _render_in_thread(
        self, request: TurnRequest, branch_reason: str | None = None, record: bool = True
    ) -> Rendered:
        prompts, session = self._prompts, self._session
        attachment = prompts.attach(session, request, record)
        if attachment is not None and attachment.branch_reason is not None and branch_reason is not None:
            attachment = attachment._replace(branch_reason=branch_reason)
        return await self._threads.run(self._large, prompts.render, session, request, attachment)

    async def digest(self, position: bytes, body: RawBody, *, first: bool) -> bytes:
        """Hashes the body and a request's position in it, which is the `first` or a further one."""
        if first and self._first_digest is not None:
            return self._first_digest
        if not self._large:
            return digest_of(position, body)
        return await self._threads.run(True, digest_of, position, body)

    async def count(self, request: TurnRequest) -> int:
        """Returns the number of tokens of a request's prompt; the session is not changed. Raises ApiError."""
        prompts, session = self._prompts, self._session
        session.check_open(asyncio.get_running_loop().time())
        try:
            if self._large:
                raise LargeText
            attachment = prompts.attach(session, request, record=False)
            rendered = prompts.render(session, request, attachment, inline=True)
        except LargeText:
            await self._lock()
            rendered = await self._render_in_thread(request, record=False)
        attachment, delta = rendered
        assert attachment is not None, "raw prompts are not counted"
        return len(session.tree.prompt(attachment.parent, delta))
