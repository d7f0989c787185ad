"""HTTP client of engines: generate, abort and health probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from tidegate.errors import EngineError
from tidegate.gateway.engines.loop_delay import DelayTolerantConnector, delay_tolerant_timeout
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError, read_reply

REFUSALS = frozenset({400, 422})
RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})


class ProbeTimeout(Exception):
    """An engine accepted the connection but did not answer within the probe timeout."""


class EngineClient:
    """HTTP client of all engines; create and close it on the same event loop."""

    def __init__(self, connect_s: float, probe_timeout_s: float) -> None:
        # Servers close idle connections after 5 s or more; closing earlier avoids a race with them.
        connector = DelayTolerantConnector(connect_s, keepalive_s=3.0)
        timeout = aiohttp.ClientTimeout(total=None)
        headers = {"Content-Type": "application/json"}
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers)
        self._connect_s = connect_s
        self._probe_timeout_s = probe_timeout_s
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait up to 2 s for pending aborts, then close the connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._http.close()

    async def generate(
        self, url: str, body: bytes, stream: bool, take: Callable[[GenerateResult], None]
    ) -> None:
        """Call `/generate`; `take` receives the cumulative result, the last one with a finish reason.

        Raises RequestRefusedError if the engine refuses the request, EngineError if it fails or its reply
        is invalid, aiohttp.ClientError or OSError if the connection fails.
        """
        async with self._http.post(url + "/generate", data=body) as response:
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
                newest = next((event for event in reversed(data) if event != b"[DONE]"), None)
                if newest is not None:
                    # Events are cumulative: the newest contains the others.
                    piece = read_reply(_event(url, newest), partial=True)
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
            async with delay_tolerant_timeout(self._probe_timeout_s), self._http.get(address) as response:
                data = await response.read()
        except TimeoutError:
            raise ProbeTimeout from None
        except (aiohttp.ClientError, OSError, UnicodeError):  # UnicodeError: invalid host name
            return None
        if response.status != 200:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return data

    def abort(self, urls: tuple[str, ...], rid: str) -> None:
        """Abort a request on the engines in a background task."""
        task = asyncio.create_task(self._abort(urls, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, urls: tuple[str, ...], rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=self._connect_s)
        body = orjson.dumps({"rid": rid})
        for url in urls:
            with contextlib.suppress(aiohttp.ClientError, OSError):  # an unreachable engine runs no requests
                async with self._http.post(url + "/abort_request", data=body, timeout=timeout):
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
    if status in REFUSALS:
        return RequestRefusedError(url, _reason(data) or text)
    return EngineError(f"{url} returned HTTP {status}: {text}", retryable=status in RETRYABLE)


def _reason(data: bytes) -> str | None:
    """The message in an error body; SGLang sends it at the top level or under `error`."""
    try:
        payload = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    holder = payload.get("error", payload) if isinstance(payload, dict) else None
    message = holder.get("message") if isinstance(holder, dict) else None
    return message[:1000] if isinstance(message, str) else None
