"""Routes the calls of a sharded gateway, behind one address that looks like a single gateway.

The front stores no sessions. It routes control calls by the shard index in an id, and group calls by the hash
of the group id; it aggregates leases and listings. Agents receive the address of their shard; for agents that
can be given only a key, the front proxies `/v1/…`.
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
from tidegate.gateway.ids import new_id
from tidegate.gateway.metrics import PREFIX
from tidegate.gateway.sharding.fleet import Answer, Fleet, Refused, raise_for_status
from tidegate.gateway.sharding.leases import LeaseAggregator
from tidegate.gateway.sharding.proxy import ReverseProxy
from tidegate.gateway.sharding.shard import Shard, shard_of_group, shard_of_id
from tidegate.gateway.turns.request_body import ClientGone, read_body
from tidegate.prometheus import CONTENT_TYPE, counter, exposition, gauge, merged
from tidegate.service.api_key import ApiKey

log = logging.getLogger("tidegate.gateway.sharding.shard")

_WITHOUT_KEY = frozenset({"/health", "/ready"})
Handler = Callable[[Request], Awaitable[Response]]


class ShardRouter:
    """The routes of the front. `create_app` returns the ASGI app, whose lifespan owns the shards.

    `on_failure` is called once, with the reason, when a shard exits too often or does not start.
    """

    def __init__(
        self, shards: Sequence[Shard], admin_key: str | None, on_failure: Callable[[str], None]
    ) -> None:
        self.instance = new_id()
        self.failed: str | None = None
        self.fleet = Fleet(shards, admin_key, self._fail)
        self._key = ApiKey(admin_key, lambda: GatewayError("the gateway's admin key is required", status=401))
        self._leases = LeaseAggregator(self.fleet)
        self._on_failure = on_failure
        self._next = count()

    def create_app(self) -> ASGIApp:
        proxy, key = ReverseProxy(self.fleet), self._key
        routes = [
            Route(path, _endpoint(handler, None if path in _WITHOUT_KEY else key), methods=[method])
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
            data_plane = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/s/"))
            await (proxy if data_plane else control)(scope, receive, send)

        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            await self.fleet.start()
        except TidegateError as error:
            self._fail(str(error))
            raise
        try:
            yield
        finally:
            await self.fleet.close()

    def _fail(self, why: str) -> None:
        if self.failed is None:
            self.failed = why
            log.error("%s", why)
            self._on_failure(why)

    # -- sessions --------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        """Open a session on the shard of its group, or on the next shard; it returns its own address."""
        body = await _body(request)
        group_id = _field(body, "group_id")
        shards = self.fleet.shards
        index = (
            shard_of_group(group_id, len(shards)) if group_id is not None else next(self._next) % len(shards)
        )
        host = request.url.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        address = f"{host}:{urlsplit(shards[index].url).port}"
        headers = {**_authorization(request), "Host": address}
        return _forward(await self.fleet.call(index, "POST", "/sessions", body, headers))

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        index = shard_of_id(session_id, len(self.fleet.shards))
        if index is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        return await self._forward_to(index, request)

    # -- groups ----------------------------------------------------------------------------------

    async def _group(self, request: Request) -> Response:
        return await self._forward_to(
            shard_of_group(request.path_params["id"], len(self.fleet.shards)), request
        )

    async def _groups(self, request: Request) -> Response:
        answers = await self.fleet.call_all("GET", "/groups", None, _authorization(request))
        return _json({"groups": [row for answer in answers for row in answer.json()["groups"]]})

    async def _ack(self, request: Request) -> Response:
        body = await _body(request)
        lease_id = _field(body, "lease_id") or ""
        index = shard_of_id(lease_id, len(self.fleet.shards))
        if index is None:
            raise GatewayError(f"there is no lease {lease_id}", status=404)
        return _forward(await self.fleet.call(index, "POST", "/groups/ack", body, _authorization(request)))

    async def _lease(self, request: Request) -> Response:
        try:
            body = schemas.Lease.model_validate_json(await _body(request))
        except ValidationError as error:
            raise GatewayError(schemas.explain(list(error.errors())), status=400) from None
        lease = asyncio.create_task(self._leases.lease(body, _authorization(request)))
        gone = asyncio.ensure_future(request.receive())
        connected = False
        try:
            await asyncio.wait((lease, gone), return_when=asyncio.FIRST_COMPLETED)
            connected = not gone.done()
            if connected:
                return Response(msgpack.packb({"groups": lease.result()}), media_type="application/msgpack")
            return Response(status_code=499)
        finally:
            gone.cancel()
            if not connected:
                lease.cancel()
                groups = (await asyncio.gather(lease, return_exceptions=True))[0]
                if isinstance(groups, list):  # leased for a client that has disconnected
                    await self._leases.release(groups)

    # -- engines ---------------------------------------------------------------------------------

    async def _engines(self, request: Request) -> Response:
        body = await _body(request)
        answers = await self.fleet.call_each(request.method, "/engines", body, _authorization(request))
        done = [answer for answer in answers if isinstance(answer, Answer) and answer.status < 400]
        engine = orjson.loads(body) if done else {}
        # A shard that did not answer gets the change after its restart.
        if done and request.method != "DELETE":
            row = done[0].json()
            admitted = engine.get("admitted", None if row["admitted"] else False)
            self.fleet.engines[row["url"]] = {
                "url": row["url"],
                "control": row["control"],
                "admitted": admitted,
            }
        elif done:
            self.fleet.engines.pop(engine["url"].rstrip("/"), None)
        return _forward(raise_for_status(answers)[0])

    async def _list_engines(self, request: Request) -> Response:
        """Each engine once: healthy and admitted if it is so on every shard; calls and limits are summed."""
        answers = await self.fleet.call_all("GET", "/engines", None, _authorization(request))
        rows: dict[str, dict[str, Any]] = {}
        for row in (row for answer in answers for row in answer.json()["engines"]):
            total = rows.setdefault(row["url"], row)
            if total is not row:
                if total["state"] == "healthy":
                    total["state"] = row["state"]
                total["healthy"] = total["healthy"] and row["healthy"]
                total["admitted"] = total["admitted"] and row["admitted"]
                total["quarantined"] = total["quarantined"] or row["quarantined"]
                for name in ("calls", "limit", "sessions"):
                    total[name] += row[name]
        return _json({"engines": list(rows.values())})

    # -- health and metrics ----------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        down = [f"shard {shard.index} is restarting" for shard in self.fleet.shards if not shard.up.is_set()]
        reason = self.failed or ", ".join(down)
        if not reason:
            answers = await self._call_each_shard("/health")
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
        ready = up and all(answer.status == 200 for answer in await self._call_each_shard("/ready"))
        return _json({"ready": ready}, 200 if ready else 503)

    async def _call_each_shard(self, path: str) -> list[Answer]:
        return await asyncio.gather(
            *(self.fleet.call(shard.index, "GET", path) for shard in self.fleet.shards)
        )

    async def _metrics(self, request: Request) -> Response:
        answers = await self.fleet.call_all("GET", "/metrics", None, _authorization(request))
        restarts = {str(shard.index): shard.restarts for shard in self.fleet.shards}
        own = [
            gauge(f"{PREFIX}_shards", len(self.fleet.shards)),
            counter(f"{PREFIX}_shard_restarts", restarts, "shard"),
        ]
        texts = {str(index): answer.body.decode() for index, answer in enumerate(answers)}
        return Response(exposition([*own, *merged(texts, "shard")]), media_type=CONTENT_TYPE)

    async def _forward_to(self, index: int, request: Request) -> Response:
        """Forward a control call unchanged to one shard."""
        path = request.scope["raw_path"].decode("latin-1")
        body = await _body(request)
        return _forward(
            await self.fleet.call(index, request.method, path, body or None, _authorization(request))
        )


def _endpoint(handler: Handler, key: ApiKey | None) -> Handler:
    """Wrap a handler: check the key before the body is read, and turn errors into responses."""

    async def endpoint(request: Request) -> Response:
        try:
            if key is not None:
                await key(request)
            return await handler(request)
        except Refused as error:
            return _forward(error.answer)
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
    """A string field of a JSON body, or None; the shard reports an invalid body."""
    with contextlib.suppress(orjson.JSONDecodeError):
        payload = orjson.loads(body)
        if isinstance(payload, dict) and isinstance(payload.get(name), str):
            return str(payload[name])
    return None


def _authorization(request: Request) -> dict[str, str]:
    """The caller's Authorization header, which the shard checks."""
    authorization = request.headers.get("authorization")
    return {} if authorization is None else {"Authorization": authorization}


def _forward(answer: Answer) -> Response:
    headers = {"x-should-retry": "false"} if 400 <= answer.status < 500 else {}
    return Response(answer.body, answer.status, headers, answer.content_type)


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(message: str, status: int) -> Response:
    return _json({"error": {"message": message, "type": "gateway_error", "code": status}}, status)


async def _no_route(request: Request, _: Exception) -> Response:
    return _error(f"no route {request.method} {request.url.path}", 404)
