"""The front of a sharded gateway: one address for the trainer, which looks like one gateway.

It holds no session. Control calls go to the shard that an id names, a group's to the shard of its hash;
leases are gathered, listings joined. Agents are handed their shard's own address; for those that can be
told only a key, `/v1/…` is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import msgpack
import orjson
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.errors import GatewayError, TidegateError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.http import schemas
from tidegate.gateway.http.prometheus import PREFIX
from tidegate.gateway.ids import new_id
from tidegate.gateway.sharding.fleet import Answer, Fleet, Refused, checked
from tidegate.gateway.sharding.leases import LeaseAggregator
from tidegate.gateway.sharding.proxy import ReverseProxy
from tidegate.gateway.sharding.shard import Shard, shard_of_group, shard_of_id
from tidegate.gateway.turns.request_body import ClientGone, read_body
from tidegate.prometheus import merged, prometheus
from tidegate.service.api_key import ApiKey

log = logging.getLogger("tidegate.gateway.sharding.shard")

_OPEN = frozenset({"/health", "/ready"})
Handler = Callable[[Request], Awaitable[Response]]


class ShardRouter:
    """The routes of a front. `create_app` makes the ASGI app, whose lifespan owns the shards.

    `on_death` is called once, with the reason, when a shard cannot be kept alive.
    """

    def __init__(
        self, shards: Sequence[Shard], admin_key: str | None, on_death: Callable[[str], None]
    ) -> None:
        self.instance = new_id()
        self.failed: str | None = None
        self.fleet = Fleet(shards, admin_key, self._died)
        self._key = ApiKey(admin_key, lambda: GatewayError("this needs the gateway's admin key", status=401))
        self._leasing = LeaseAggregator(self.fleet)
        self._on_death = on_death
        self._next = count()

    def create_app(self) -> ASGIApp:
        passage, key = ReverseProxy(self.fleet), self._key
        routes = [
            Route(path, _guarded(handler, None if path in _OPEN else key), methods=[method])
            for method, path, handler in (
                ("POST", "/sessions", self._open),
                ("GET", "/sessions/{id}", self._session),
                ("DELETE", "/sessions/{id}", self._session),
                ("POST", "/sessions/{id}/reward", self._session),
                ("POST", "/sessions/{id}/finish", self._session),
                ("GET", "/sessions/{id}/trajectory", self._session),
                ("GET", "/groups", self._groups),
                ("POST", "/groups/lease", self._lease),
                ("POST", "/groups/ack", self._ack),
                ("POST", "/groups/{id:path}/seal", self._group),
                ("DELETE", "/groups/{id:path}", self._group),
                ("GET", "/engines", self._list_engines),
                ("POST", "/engines", self._engines),
                ("PATCH", "/engines", self._engines),
                ("DELETE", "/engines", self._engines),
                ("GET", "/health", self._health),
                ("GET", "/ready", self._ready),
                ("GET", "/metrics", self._metrics),
            )
        ]
        control = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={404: _no_route})

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            passed = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/s/"))
            await (passage if passed else control)(scope, receive, send)

        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            await self.fleet.start()
        except TidegateError as error:
            self._died(str(error))
            raise
        try:
            yield
        finally:
            await self.fleet.close()

    def _died(self, why: str) -> None:
        if self.failed is None:
            self.failed = why
            log.error("%s", why)
            self._on_death(why)

    # -- sessions --------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        """On the shard of its group; where it has none, on the next one. It hands out its own address."""
        body = await _body(request)
        group_id = _field(body, "group_id")
        shards = self.fleet.shards
        index = (
            shard_of_group(group_id, len(shards)) if group_id is not None else next(self._next) % len(shards)
        )
        host = request.url.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        address = f"{host}:{urlsplit(shards[index].url).port}"
        headers = {**_right(request), "Host": address}
        return _passed(await self.fleet.ask(index, "POST", "/sessions", body, headers))

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        index = shard_of_id(session_id, len(self.fleet.shards))
        if index is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        return await self._to(index, request)

    # -- groups ----------------------------------------------------------------------------------

    async def _group(self, request: Request) -> Response:
        return await self._to(shard_of_group(request.path_params["id"], len(self.fleet.shards)), request)

    async def _groups(self, request: Request) -> Response:
        answers = await self.fleet.ask_all("GET", "/groups", None, _right(request))
        return _json({"groups": [row for answer in answers for row in answer.json()["groups"]]})

    async def _ack(self, request: Request) -> Response:
        body = await _body(request)
        lease_id = _field(body, "lease_id") or ""
        index = shard_of_id(lease_id, len(self.fleet.shards))
        if index is None:
            raise GatewayError(f"there is no lease {lease_id}", status=404)
        return _passed(await self.fleet.ask(index, "POST", "/groups/ack", body, _right(request)))

    async def _lease(self, request: Request) -> Response:
        try:
            asked = schemas.Lease.model_validate_json(await _body(request))
        except ValidationError as error:
            raise GatewayError(schemas.explain(list(error.errors())), status=400) from None
        lease = asyncio.create_task(self._leasing.lease(asked, _right(request)))
        gone = asyncio.ensure_future(request.receive())
        there = False
        try:
            await asyncio.wait((lease, gone), return_when=asyncio.FIRST_COMPLETED)
            there = not gone.done()
            if there:
                return Response(msgpack.packb({"groups": lease.result()}), media_type="application/msgpack")
            return Response(status_code=499)
        finally:
            gone.cancel()
            if not there:
                # Whoever asked has left: what was leased meanwhile is for the next one who asks.
                lease.cancel()
                given = (await asyncio.gather(lease, return_exceptions=True))[0]
                if isinstance(given, list):
                    await self._leasing.give_back(given)

    # -- engines ---------------------------------------------------------------------------------

    async def _engines(self, request: Request) -> Response:
        body = await _body(request)
        answers = await self.fleet.ask_each(request.method, "/engines", body, _right(request))
        done = [one for one in answers if isinstance(one, Answer) and one.status < 400]
        engine = orjson.loads(body) if done else {}
        # A shard that did not answer is told of it when it is started again, as the others did it.
        if done and request.method != "DELETE":
            row = done[0].json()
            waits = False if not row["admitted"] else None
            told = {"url": row["url"], "control": row["control"], "admitted": engine.get("admitted", waits)}
            self.fleet.engines[row["url"]] = told
        elif done:
            self.fleet.engines.pop(engine["url"].rstrip("/"), None)
        return _passed(checked(answers)[0])

    async def _list_engines(self, request: Request) -> Response:
        """Each once: healthy and admitted where it is so on every shard, with what all shards do there."""
        answers = await self.fleet.ask_all("GET", "/engines", None, _right(request))
        rows: dict[str, dict[str, Any]] = {}
        for row in (row for answer in answers for row in answer.json()["engines"]):
            known = rows.setdefault(row["url"], row)
            if known is not row:
                if known["state"] == "healthy":
                    known["state"] = row["state"]
                known["healthy"] = known["healthy"] and row["healthy"]
                known["admitted"] = known["admitted"] and row["admitted"]
                known["quarantined"] = known["quarantined"] or row["quarantined"]
                for name in ("calls", "limit", "sessions"):
                    known[name] += row[name]
        return _json({"engines": list(rows.values())})

    # -- what it says of itself ------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        down = [
            f"shard {shard.index} is being started again"
            for shard in self.fleet.shards
            if not shard.up.is_set()
        ]
        reason = self.failed or ", ".join(down)
        if not reason:
            answers = await self._all_of("/health")
            reason = "; ".join(
                f"shard {index}: {answer.json().get('reason')}"
                for index, answer in enumerate(answers)
                if answer.status != 200
            )
        if not reason:
            return _json({"instance": self.instance, "status": "ok"})
        return _json({"instance": self.instance, "status": "failed", "reason": reason}, 503)

    async def _ready(self, _: Request) -> Response:
        up = all(shard.up.is_set() for shard in self.fleet.shards)
        ready = up and all(answer.status == 200 for answer in await self._all_of("/ready"))
        return _json({"ready": ready}, 200 if ready else 503)

    async def _all_of(self, path: str) -> list[Answer]:
        return await asyncio.gather(*(self.fleet.ask(one.index, "GET", path) for one in self.fleet.shards))

    async def _metrics(self, request: Request) -> Response:
        answers = await self.fleet.ask_all("GET", "/metrics", None, _right(request))
        own = prometheus(
            PREFIX,
            [
                ("shards", "gauge", len(self.fleet.shards), ""),
                (
                    "shard_restarts_total",
                    "counter",
                    {str(shard.index): shard.restarts for shard in self.fleet.shards},
                    "shard",
                ),
            ],
        )
        texts = {str(index): answer.body.decode() for index, answer in enumerate(answers)}
        return Response(own + merged(texts, "shard"), media_type="text/plain; version=0.0.4")

    async def _to(self, index: int, request: Request) -> Response:
        """Pass a control call on as it is."""
        path = request.scope["raw_path"].decode("latin-1")
        body = await _body(request)
        return _passed(await self.fleet.ask(index, request.method, path, body or None, _right(request)))


def _guarded(handler: Handler, key: ApiKey | None) -> Handler:
    """The key is checked before anything else of the request is read."""

    async def endpoint(request: Request) -> Response:
        try:
            if key is not None:
                await key(request)
            return await handler(request)
        except Refused as error:
            return _passed(error.answer)
        except GatewayError as error:
            return _error(str(error), error.status or 400)
        except ClientGone:
            return Response(status_code=499)

    return endpoint


async def _body(request: Request) -> bytes:
    try:
        return bytes(await read_body(request.receive))
    except ApiError as refusal:
        raise GatewayError(str(refusal), status=refusal.status) from None


def _field(body: bytes, name: str) -> str | None:
    """A string in a JSON object, where there is one; what is wrong with the body the shard will say."""
    with contextlib.suppress(orjson.JSONDecodeError):
        payload = orjson.loads(body)
        if isinstance(payload, dict) and isinstance(payload.get(name), str):
            return str(payload[name])
    return None


def _right(request: Request) -> dict[str, str]:
    """The caller's own right: the shards judge it."""
    authorization = request.headers.get("authorization")
    return {} if authorization is None else {"Authorization": authorization}


def _passed(answer: Answer) -> Response:
    headers = {"x-should-retry": "false"} if 400 <= answer.status < 500 else {}
    return Response(answer.body, answer.status, headers, answer.content_type)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message, "type": "gateway_error", "code": status}}, status)


async def _no_route(request: Request, _: Exception) -> Response:
    return _error(f"{request.method} {request.url.path}: there is no such route", 404)
