"""HTTP client of engines: generate, abort and health probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import orjson

from tidegate.errors import EngineError
from tidegate.gateway.engines.protocol import GenerateResult, RequestRefusedError, read_reply
from tidegate.service.http1.client import Http1Client, delay_tolerant_timeout
from tidegate.service.http1.connection import Http1Reply
from tidegate.service.http1.errors import ConnectionLost
from tidegate.service.http1.origin import Origin, parse_url
from tidegate.service.http_client import error_in

_REFUSALS = frozenset({400, 422})
_RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
MAX_EVENT = 256 * 2**20
"""Bytes of one event of a stream."""


class ProbeTimeout(Exception):
    """An engine accepted the connection but did not answer within the probe timeout."""


class EngineClient:
    """HTTP client of all engines, with their key."""

    def __init__(self, connect_s: float, probe_timeout_s: float, key: str | None = None) -> None:
        # Servers close idle connections after 5 s or more; closing earlier avoids a race with them.
        self._http = Http1Client(connect_s, keepalive_s=3.0)
        self._connect_s = connect_s
        self._probe_timeout_s = probe_timeout_s
        self._key = key
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits up to 2 s for pending aborts, then closes the connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2.0)
        await self._http.close()

    async def generate(
        self,
        url: str,
        body: bytes,
        stream: bool,
        take: Callable[[GenerateResult], None],
        top_logprobs: int = 0,
    ) -> None:
        """Call `/generate`; `take` receives the cumulative result, the last one with a finish reason and the
        likeliest ids that the body requests. Raises
        RequestRefusedError if the engine refuses the request, EngineError if it fails or its reply is
        invalid, OSError if the connection fails."""
        with await self._post(url, "/generate", body) as reply:
            if reply.status != 200:
                raise _refused(url, reply.status, await reply.read(), dict(reply.headers))
            if not stream:
                take(read_reply(_load(url, await reply.read()), top_logprobs=top_logprobs))
                return
            buffer = b""
            while chunk := await reply.piece():
                events = (buffer + chunk).split(b"\n\n")
                buffer = events.pop()
                if len(buffer) > MAX_EVENT:
                    raise EngineError(f"{url} sent an event of more than {MAX_EVENT} bytes")
                data = [event[5:].strip() for event in events if event.startswith(b"data:")]
                data = [event for event in data if event != b"[DONE]"]
                if data:  # events are cumulative: the newest contains the others
                    piece = read_reply(_event(url, data[-1]), partial=True, top_logprobs=top_logprobs)
                    take(piece)
                    if piece.finish:
                        reply.release()
                        return
            raise ConnectionLost("the stream ended before the finish event")

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
                with await self._http.send(*_get(url, path, self._key)) as reply:
                    data = await reply.read()
        except TimeoutError:
            raise ProbeTimeout from None
        except (OSError, ValueError):  # ValueError: invalid URL
            return None
        if reply.status != 200:
            return None
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            return data

    async def _post(self, url: str, path: str, body: bytes) -> Http1Reply:
        origin, head = _post_head(url, path, self._key)
        return await self._http.send(origin, b"%b%d\r\n\r\n%b" % (head, len(body), body))

    def abort(self, urls: tuple[str, ...], rid: str) -> None:
        """Aborts a request on the engines in a background task."""
        task = asyncio.create_task(self._abort(urls, rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, urls: tuple[str, ...], rid: str) -> None:
        body = orjson.dumps({"rid": rid})
        for url in urls:
            with contextlib.suppress(OSError, ValueError):  # an unreachable engine runs no requests
                async with asyncio.timeout(self._connect_s):
                    with await self._post(url, "/abort_request", body) as reply:
                        await reply.read()


@lru_cache(maxsize=4096)
def _post_head(url: str, path: str, key: str | None) -> tuple[Origin, bytes]:
    """Returns an engine's origin and the head of a request, up to the content length."""
    origin, target, headers = _parse(url + path, key)
    line = b"POST %b HTTP/1.1\r\n" % target.encode()
    return origin, line + headers + b"content-type: application/json\r\ncontent-length: "


def _get(url: str, path: str, key: str | None) -> tuple[Origin, bytes]:
    origin, target, headers = _parse(url + path, key)
    return origin, b"GET %b HTTP/1.1\r\n%b\r\n" % (target.encode(), headers)


def _parse(address: str, key: str | None) -> tuple[Origin, str, bytes]:
    """Returns origin, target and headers; a login in the address goes before the key."""
    origin, target, headers = parse_url(address)
    if key is not None and b"\r\nauthorization:" not in headers:
        headers += b"authorization: Bearer %b\r\n" % key.encode()
    return origin, target, headers


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


def _refused(url: str, status: int, data: bytes, headers: Mapping[bytes, bytes] | None = None) -> EngineError:
    text = data[:300].decode(errors="replace")
    if 300 <= status < 400:
        places = [value for name, value in (headers or {}).items() if name.lower() == b"location"]
        place = b"".join(places).decode("latin-1")[:300] or "no address"
        return EngineError(f"{url} redirects to {place}; give this address as the engine's")
    if status in _REFUSALS:
        message = error_in(data).get("message")
        return RequestRefusedError(url, message[:1000] if isinstance(message, str) else text)
    return EngineError(f"{url} returned HTTP {status}: {text}", retryable=status in _RETRYABLE)
