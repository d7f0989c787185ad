"""Base class of HTTP clients, and what they read of an error response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
from yarl import URL


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
