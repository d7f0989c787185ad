"""Base class of HTTP clients, and what they read of an error response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp
from yarl import URL

_TICKS = 20


@contextlib.asynccontextmanager
async def delay_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `seconds`, and not before the loop has run _TICKS iterations. With thousands
    of concurrent sessions the event loop is late by seconds. A wall-clock timeout would then fail connections
    that were established but not yet processed, and quarantine a healthy engine."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def tick(remaining: int) -> None:
            if remaining == 0:
                timeout.reschedule(loop.time())
            else:
                next_tick[:] = [loop.call_later(seconds / _TICKS, tick, remaining - 1)]

        next_tick: list[asyncio.TimerHandle] = []
        tick(_TICKS)
        try:
            yield
        finally:
            next_tick[0].cancel()


class DelayTolerantConnector(aiohttp.TCPConnector):
    """Connections without a limit of their number, from an event loop that may be late by seconds.

    Args:
        connect_s: Timeout of a connection in seconds, by `delay_tolerant_timeout`.
        keepalive_s: Seconds for which an idle connection is kept. Less than the servers' own, so that a
            server does not close a connection as a request is sent.
    """

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s)
        self._connect_s = connect_s
        self._new: set[Any] = set()
        """Protocols of connections that no request has used."""

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        """Returns a connection that the server has not closed, or sent anything on, while it was idle."""
        while True:
            connection: Any = await super().connect(*arguments, **options)
            protocol = connection.protocol
            if protocol in self._new:
                self._new.remove(protocol)
                return connection
            # aiohttp sees a close only once the event loop has processed it, and would give bytes that were
            # received while idle to the next request as its reply.
            if not protocol.should_close and not _is_readable(protocol.transport):
                return connection
            connection.close()

    async def _create_connection(self, *arguments: Any, **options: Any) -> Any:
        async with delay_tolerant_timeout(self._connect_s):
            protocol = await super()._create_connection(*arguments, **options)
        self._new.add(protocol)
        return protocol


def _is_readable(transport: asyncio.Transport) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class RedirectError(aiohttp.ClientError):
    """A server redirected a request, which is not followed."""


def unredirected() -> list[aiohttp.TraceConfig]:
    """Returns the `trace_configs` of a session in which a redirect raises RedirectError.

    A server could have the request repeated at any address that this machine reaches, and read the reply.
    """

    async def refuse(_session: Any, _context: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        place = redirect.response.headers.get("Location", "no address")
        redirect.response.close()
        raise _redirected(redirect.method, redirect.url, place)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return [trace]


async def refuse_redirect(response: Any) -> None:
    """Raises RedirectError for a redirect: a response hook of clients of httpx, such as those of SDKs."""
    if response.has_redirect_location:
        request = response.request
        raise _redirected(request.method, request.url, response.headers["Location"])


def describe_failure(error: BaseException) -> str:
    """Returns type and text of an SDK's error, or of the refused redirect that some versions of it hide."""
    cause = error.__cause__ if isinstance(error.__cause__, RedirectError) else error
    return f"{type(error).__name__}: {cause}"


def _redirected(method: str, url: object, place: str) -> RedirectError:
    return RedirectError(
        f"{method} {url} was redirected to {place[:300]}, which is not followed: if the server has moved, "
        "give its new address"
    )


class HttpClient:
    """Owns the connections of one event loop, opened by the first request and closed by `close`.

    It follows no redirects: they raise RedirectError.

    Args:
        api_key: Key sent with every request, or None.
        connect_s: Timeout of a connection in seconds; a request itself has none.
    """

    def __init__(self, api_key: str | None = None, connect_s: float = 5.0) -> None:
        self._connect_s = connect_s
        self._headers = {"Content-Type": "application/json", **bearer(api_key)}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self._connect()
        return self._session

    def _connect(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        return aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, trace_configs=unredirected()
        )

    async def _send(
        self, method: str, url: str | URL, data: bytes | None = None, key: str | None = None
    ) -> tuple[int, bytes]:
        """Returns a response's status and body; `key` is sent instead of the client's key."""
        async with self.http.request(method, url, data=data, headers=bearer(key)) as response:
            return response.status, await response.read()


def bearer(api_key: str | None) -> dict[str, str]:
    """Returns the header of a key; empty for None."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def engine_headers(url: str, key: str) -> dict[str, str]:
    """Returns the header of an engine's key; empty if its address has a login, which is sent instead."""
    return {} if URL(url).user is not None else bearer(key)


def error_in(content: bytes) -> Mapping[str, Any]:
    """Returns the error of a JSON body, `{"error": {"message": …}}` or `{"message": …}`; empty if none."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    error = body.get("error", body) if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
