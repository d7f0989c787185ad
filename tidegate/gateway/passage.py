"""The data plane through the front: for agents that can be told only a URL and a key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from tidegate.gateway.dataplane import ClientGone, read_body
from tidegate.gateway.fleet import Fleet
from tidegate.gateway.refusal import Refusal
from tidegate.gateway.shards import Shard, owner

log = logging.getLogger("tidegate.gateway.shards")

_UP_S = 60.0
_OF_ONE_HOP = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"te", b"upgrade"}
)


class Passage:
    """Passes a request to the shard that its key names, and the answer back as it comes.

    What a key does not tell is told by the first shard: that the key is wrong, in the dialect's shape.
    Once it was sent a request is not sent again here: the client's retry says of itself that it is one.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shard = self._shard(scope)
        try:
            body = await read_body(receive)
        except ClientGone:
            return
        except Refusal as refusal:
            await _answer(send, refusal.status, str(refusal), [(b"x-should-retry", b"false")])
            return
        passing = asyncio.create_task(self._pass(shard, scope, body, send))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A client that left closes the connection to the shard, which aborts the generation.
            gone.cancel()
            if not passing.done():
                passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)
        if not passing.cancelled() and (error := passing.exception()) is not None:
            raise error

    def _shard(self, scope: Scope) -> Shard:
        headers = dict(scope["headers"])
        _, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shards = self._fleet.shards
        of_path = scope["path"].split("/")[2] if scope["path"].startswith("/s/") else ""
        for token in (
            of_path,
            bearer.decode("latin-1").strip(),
            headers.get(b"x-api-key", b"").decode("latin-1"),
        ):
            if (index := owner(token, len(shards))) is not None:
                return shards[index]
        return shards[0]

    async def _pass(self, shard: Shard, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        url = shard.url + scope["path"] + ("?" + query if query else "")
        started = False
        try:
            async with asyncio.timeout(_UP_S):
                await shard.up.wait()
            async with self._fleet.http.request(
                scope["method"], url, data=body, headers=_passed_on(scope["headers"])
            ) as response:
                headers = [
                    (name.lower(), value)
                    for name, value in response.raw_headers
                    if name.lower() not in _OF_ONE_HOP - {b"content-length"}
                ]
                started = True
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise  # the server closes the connection, and so tells the client
            log.warning("shard %d: %s %s: %s", shard.index, scope["method"], scope["path"], error)
            await _answer(send, 503, f"shard {shard.index} cannot be reached just now", [])


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _OF_ONE_HOP
    ]


async def _answer(send: Send, status: int, message: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = orjson.dumps({"error": {"message": message, "type": "gateway_error", "param": None, "code": None}})
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
