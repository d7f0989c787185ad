"""Proxies the data plane through the router, for agents that can be given only a URL and a key."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterable

import aiohttp
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from tidegate.gateway.http.base import error_response
from tidegate.gateway.sharding.fleet import Fleet
from tidegate.gateway.sharding.shard import Shard, shard_of_id
from tidegate.service.service import LOOPBACK

log = logging.getLogger("tidegate.gateway.sharding.shard")

_UP_S = 60.0
_HOP_BY_HOP = frozenset({b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade"})


class _Upload:
    """Streams a request body without buffering it, so that the shard checks the key first and enforces its
    limits of size and time."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self._empty = not names & {b"content-length", b"transfer-encoding"}
        self._receive = receive
        self._over = asyncio.Event()
        self.disconnected = False
        """The client disconnected before the end of the body."""

    def body(self) -> AsyncIterator[bytes] | None:
        if self._empty:
            self._over.set()
            return None
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise ConnectionError("the client disconnected before the end of its request")
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._over.set()

    async def client_gone(self) -> None:
        """Wait until the client disconnects, after its whole request was forwarded."""
        await self._over.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


POLL = "/attempts/next"


def shard_url(shard: Shard, scope: Scope) -> URL:
    """The URL of a request at a shard, with the raw path and query: decoding and re-encoding could change the
    path."""
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return URL(shard.url + path + ("?" + query if query else ""), encoded=True)


def host_of(scope: Scope, shard: Shard) -> str:
    """The `Host` of a shard: the host that the client calls, with the shard's port."""
    host = Request(scope).url.hostname or LOOPBACK
    return f"{f'[{host}]' if ':' in host else host}:{URL(shard.url).port}"


class ReverseProxy:
    """Streams a request to the shard of its session, attempt or key, and the response back.

    A worker polls each shard, which it names in the query (`?shard=1`); polls without a name go to one shard
    after another, so that no attempt waits for ever. A request without a valid key goes to the first shard,
    which refuses it in the client's dialect. Requests are not retried here: a client's own retry is marked
    as one.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._polled = itertools.cycle(fleet.shards)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        upload = _Upload(scope, receive)
        proxying = asyncio.create_task(self._proxy(self._shard(scope), scope, receive, send, upload))
        gone = asyncio.create_task(upload.client_gone())
        try:
            await asyncio.wait((proxying, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelling closes the connection to the shard, which aborts the generation.
            gone.cancel()
            if not proxying.done():
                proxying.cancel()
            await asyncio.gather(proxying, gone, return_exceptions=True)
        if not proxying.cancelled() and (error := proxying.exception()) is not None:
            raise error

    def _shard(self, scope: Scope) -> Shard:
        headers = dict(scope["headers"])
        _, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shards = self._fleet.shards
        if scope["path"] == POLL:
            if not scope["query_string"]:
                return next(self._polled)
            name = scope["query_string"].decode("latin-1").removeprefix("shard=") + "."
        else:
            name = scope["path"].split("/")[2] if scope["path"].startswith(("/s/", "/attempts/")) else ""
        for token in (
            name,
            bearer.decode("latin-1").strip(),
            headers.get(b"x-api-key", b"").decode("latin-1"),
        ):
            if (index := shard_of_id(token, len(shards))) is not None:
                return shards[index]
        return shards[0]

    async def _proxy(self, shard: Shard, scope: Scope, receive: Receive, send: Send, upload: _Upload) -> None:
        url = shard_url(shard, scope)
        headers = _end_to_end(scope["headers"])
        if scope["path"] == POLL:
            headers.append(("Host", host_of(scope, shard)))  # attempts get the address of their shard
        started = False
        try:
            async with asyncio.timeout(_UP_S):
                await shard.up.wait()
            async with self._fleet.http.request(
                scope["method"], url, data=upload.body(), headers=headers
            ) as response:
                answered = [
                    (name.lower(), value)
                    for name, value in response.raw_headers
                    if name.lower() not in _HOP_BY_HOP
                ]
                started = True
                await send({"type": "http.response.start", "status": response.status, "headers": answered})
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if upload.disconnected:
                return
            if started:
                raise  # the server then closes the connection to the client
            log.warning("shard %d: %s %s: %s", shard.index, scope["method"], scope["path"], error)
            refusal = error_response(f"shard {shard.index} cannot be reached; retry later", 503)
            await refusal(scope, receive, send)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _HOP_BY_HOP
    ]
