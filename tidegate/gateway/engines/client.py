"""HTTP client of engines: generate, abort and health probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson

from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError, read_reply
from tidegate.service.http_client import HttpClient, error_in

_REFUSALS = frozenset({400, 422})
_RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
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
    """TCP connector without a connection limit; connecting times out after `connect_s`."""

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s)
        self._connect_s = connect_s

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        async with delay_tolerant_timeout(self._connect_s):
            return await super().connect(*arguments, **options)


class ProbeTimeout(Exception):
    """An engine accepted the connection but did not answer within the probe timeout."""


class EngineClient(HttpClient):
    """HTTP client of all engines."""

    def __init__(self, connect_s: float, probe_timeout_s: float) -> None:
        super().__init__(connect_s=connect_s)
        self._probe_timeout_s = probe_timeout_s
        self._aborts: set[asyncio.Task[None]] = set()

    def _connect(self) -> aiohttp.ClientSession:
        # Servers close idle connections after 5 s or more; closing earlier avoids a race with them.
        connector = DelayTolerantConnector(self._connect_s, keepalive_s=3.0)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Waits up to 2 s for pending aborts, then closes the connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        await super().close()

    async def generate(
        self, url: str, body: bytes, stream: bool, take: Callable[[GenerateResult], None]
    ) -> None:
        """Call `/generate`; `take` receives the cumulative result, the last one with a finish reason. Raises
        RequestRefusedError if the engine refuses the request, EngineError if it fails or its reply is
        invalid, aiohttp.ClientError or OSError if the connection fails."""
        async with self.http.post(url + "/generate", data=body) as response:
            if response.status != 200:
                raise _refused(url, response.status, await response.read())
            if not stream:
                take(read_reply(_load(url, await response.read())))
                return
            buffer = b""
            async for chunk in response.content.iter_any():
                events = (buffer + chunk).split(b"\n\n")
                buffer = events.pop()
                data = [event[5:].strip() for event in events if event.startswith(b"data:")]
                data = [event for event in data if event != b"[DONE]"]
                if data:  # events are cumulative: the newest contains the others
                    piece = read_reply(_event(url, data[-1]), partial=True)
                    take(piece)
                    if piece.finish:
                        return
            raise aiohttp.ServerDisconnectedError("the stream ended before the finish event")

    async def info(self, url: str) -> dict[str, Any] | None:
        """The reply of `/model_info`; None if the request fails. Raises ProbeTimeout."""
        info = await self._probe(url + "/model_info")
        return info if isinstance(info, dict) else None

    async def is_healthy(self, url: str) -> bool:
        """Whether a router answers `/health`. Raises ProbeTimeout."""
        return await self._probe(url + "/health") is not None

    async def _probe(self, address: str) -> Any:
        try:
            async with delay_tolerant_timeout(self._probe_timeout_s):
                status, data = await self._send("GET", address)
        except TimeoutError:
            raise ProbeTimeout from None
        except (aiohttp.ClientError, OSError, UnicodeError):  # UnicodeError: invalid host name
            return None
        if status != 200:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return data

    def abort(self, urls: tuple[str, ...], rid: str) -> None:
        """Aborts a request on the engines in a background task."""
        task = asyncio.create_task(self._abort(urls, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, urls: tuple[str, ...], rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=self._connect_s)
        body = orjson.dumps({"rid": rid})
        for url in urls:
            with contextlib.suppress(aiohttp.ClientError, OSError):  # an unreachable engine runs no requests
                async with self.http.post(url + "/abort_request", data=body, timeout=timeout):
                    pass


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
        raise _refused(url, status if isinstance(status, int) else 500, data)
    return payload


def _refused(url: str, status: int, data: bytes) -> EngineError:
    text = data[:300].decode(errors="replace")
    if status in _REFUSALS:
        message = error_in(data).get("message")
        return RequestRefusedError(url, message[:1000] if isinstance(message, str) else text)
    return EngineError(f"{url} returned HTTP {status}: {text}", retryable=status in _RETRYABLE)
