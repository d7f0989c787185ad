"""HTTP client of engines: generate, abort and health probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import aiohttp
import orjson
from yarl import URL

from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError, read_reply
from tidegate.service.http_client import (
    DelayTolerantConnector,
    HttpClient,
    delay_tolerant_timeout,
    engine_headers,
    error_in,
)
from tidegate.types import PACKED_LISTS

_REFUSALS = frozenset({400, 422})
_RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
MAX_EVENT = MAX_BODY = 256 * 2**20
"""Bytes of one event of a stream, and of a reply that is read as a whole."""
_REST_S = 1.0
"""Seconds in which the end of a stream must follow its last event for the connection to be kept."""


class ProbeTimeout(Exception):
    """An engine accepted the connection but did not answer within the probe timeout."""


class EngineClient(HttpClient):
    """HTTP client of all engines, with their key."""

    def __init__(self, connect_s: float, probe_timeout_s: float, key: str | None = None) -> None:
        super().__init__(connect_s=connect_s)
        self._probe_timeout_s = probe_timeout_s
        self._key = key
        self._aborts: set[asyncio.Task[None]] = set()

    def _connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # Servers close idle connections after 5 s or more; closing earlier avoids a race with them.
            connector=DelayTolerantConnector(self._connect_s, keepalive_s=3.0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),  # a compressed reply would cost time
        )

    async def close(self) -> None:
        """Waits up to 2 s for pending aborts, then closes the connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        await super().close()

    async def generate(
        self,
        url: str,
        body: bytes,
        stream: bool,
        take: Callable[[GenerateResult], None],
        read: Callable[..., GenerateResult] = read_reply,
    ) -> None:
        """Call `/generate`; `take` receives the cumulative result, the last one with a finish reason. `read`
        reads the parts of a reply that the body requests. Raises RequestRefusedError if the engine refuses
        the request, EngineError if it fails or its reply is invalid, OSError if the connection fails."""
        try:
            reply = await self._post(url, "/generate", body)
            try:
                if reply.status != 200:
                    raise _refused(url, reply, await _read(url, reply))
                if not stream:
                    data = await _read(url, reply)
                    take(read(_load(url, data)))
                    return
                await _read_events(url, reply, take, read)
                if not reply.closed:  # aiohttp keeps the connection once the end of the stream arrives
                    asyncio.get_running_loop().call_later(_REST_S, reply.close)
            except BaseException:
                reply.close()
                raise
        except aiohttp.ClientError as error:
            raise self._connection_error(error) from error

    def _connection_error(self, error: aiohttp.ClientError) -> OSError:
        """Returns the OSError that describes a failure of aiohttp, with the `errno` of its cause."""
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return TimeoutError(f"connecting took longer than {self._connect_s:g} s")
        if isinstance(error, aiohttp.ClientConnectorError):
            failure = ConnectionError(f"cannot connect: {error.os_error}")
        elif isinstance(error, aiohttp.ClientPayloadError):
            failure = ConnectionError(f"the connection was closed in the middle of the reply: {error}")
        elif isinstance(error, aiohttp.ClientConnectionError):
            failure = ConnectionError(f"the connection was closed without a reply: {error}")
        else:
            return OSError(f"invalid HTTP reply or address: {error}")
        failure.errno = getattr(error, "errno", None)
        return failure

    async def info(self, url: str) -> dict[str, Any] | None:
        """The reply of `/model_info`; None if the request fails. Raises ProbeTimeout."""
        info = await self._probe(url, "/model_info")
        return info if isinstance(info, dict) else None

    async def is_healthy(self, url: str) -> bool:
        """Whether a router answers `/health`. Raises ProbeTimeout."""
        return await self._probe(url, "/health") is not None

    async def _probe(self, url: str, path: str) -> Any:
        try:
            async with delay_tolerant_timeout(self._probe_timeout_s):
                address, headers = _target(url, path, self._key)
                async with self.http.get(address, headers=headers, allow_redirects=False) as reply:
                    data = await _read(url, reply)
        except TimeoutError:
            raise ProbeTimeout from None
        except (OSError, aiohttp.ClientError, EngineError, ValueError):  # ValueError: invalid URL
            return None
        if reply.status != 200:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return data

    async def _post(self, url: str, path: str, body: bytes) -> aiohttp.ClientResponse:
        address, headers = _target(url, path, self._key)
        return await self.http.post(address, data=body, headers=headers, allow_redirects=False)

    def abort(self, urls: tuple[str, ...], rid: str) -> None:
        """Aborts a request on the engines in a background task."""
        task = asyncio.create_task(self._abort(urls, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, urls: tuple[str, ...], rid: str) -> None:
        body = orjson.dumps({"rid": rid})
        for url in urls:
            # An unreachable engine runs no requests.
            with contextlib.suppress(OSError, aiohttp.ClientError, EngineError, ValueError):
                async with (
                    asyncio.timeout(self._connect_s),
                    await self._post(url, "/abort_request", body) as reply,
                ):
                    await _read(url, reply)


@lru_cache(maxsize=4096)
def _target(url: str, path: str, key: str | None) -> tuple[URL, dict[str, str]]:
    """Returns the address of a request and its headers."""
    headers = {"Content-Type": "application/json", PACKED_LISTS: "1"}
    headers |= {} if key is None else engine_headers(url, key)
    return URL(url + path), headers


async def _read(url: str, reply: aiohttp.ClientResponse) -> bytes:
    """Returns the body of a reply. Raises EngineError if it is larger than MAX_BODY."""
    pieces, size = [], 0
    while not reply.content.at_eof():
        piece = await reply.content.readany()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY:
            raise EngineError(f"{url} sent a body of more than {MAX_BODY} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _read_events(
    url: str,
    reply: aiohttp.ClientResponse,
    take: Callable[[GenerateResult], None],
    read: Callable[..., GenerateResult],
) -> None:
    """Reads a stream up to its finish event."""
    buffer = b""
    async for chunk in reply.content.iter_any():
        events = (buffer + chunk).split(b"\n\n")
        buffer = events.pop()
        if len(buffer) > MAX_EVENT:
            raise EngineError(f"{url} sent an event of more than {MAX_EVENT} bytes")
        data = [event[5:].strip() for event in events if event.startswith(b"data:")]
        data = [event for event in data if event != b"[DONE]"]
        if data:  # events are cumulative: the newest contains the others
            piece = read(_event(url, data[-1]), partial=True)
            take(piece)
            if piece.finish:
                return
    raise ConnectionError("the stream ended before the finish event")


def _load(url: str, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EngineError(f"{url} returned invalid JSON: {data[:200]!r}") from None


def _event(url: str, data: bytes) -> Any:
    payload = _load(url, data)
    if isinstance(payload, dict) and "error" in payload:
        error = payload["error"]
        status = error.get("code") if isinstance(error, dict) else None
        raise _refusal(url, status if isinstance(status, int) else 500, data)
    return payload


def _refused(url: str, reply: aiohttp.ClientResponse, data: bytes) -> EngineError:
    if 300 <= reply.status < 400:
        place = reply.headers.get("Location", "no address")[:300]
        return EngineError(f"{url} redirects to {place}; give this address as the engine's")
    return _refusal(url, reply.status, data)


def _refusal(url: str, status: int, data: bytes) -> EngineError:
    text = data[:300].decode(errors="replace")
    if status in _REFUSALS:
        message = error_in(data).get("message")
        return RequestRefusedError(url, message[:1000] if isinstance(message, str) else text)
    return EngineError(f"{url} returned HTTP {status}: {text}", retryable=status in _RETRYABLE)
