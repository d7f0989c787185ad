"""Routes the calls of a sharded gateway, behind one address that looks like a single gateway.

The router stores no sessions. It routes control calls by the shard index in an id, and group calls by the
hash of the group id; it aggregates leases and listings. Agents receive the address of their shard; for agents
that can be given only a key, the router proxies `/v1/…`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.errors import GatewayError, TidegateError
from tidegate.gateway.errors import ApiError, wrong_address
from tidegate.gateway.http import schemas
from tidegate.gateway.http.base import error_response, unless_disconnected
from tidegate.gateway.ids import new_id
from tidegate.gateway.metrics import PREFIX
from tidegate.gateway.sharding.fleet import Answer, Fleet, LeaseAggregator, Refused, raise_for_status
from tidegate.gateway.sharding.proxy import ReverseProxy, host_of
from tidegate.gateway.sharding.shard import Shard, shard_of_group, shard_of_id
from tidegate.gateway.turns.request_reader import ClientGone, read_body
from tidegate.prometheus import CONTENT_TYPE, counter, exposition, gauge, merged
from tidegate.service import exact
from tidegate.service.api_key import ApiKey

log = logging.getLogger("tidegate.gateway.sharding.shard")
Handler = Callable[[Request], Awaitable[Response]]
ShardChoice = Callable[[Request, bytes], int]
"""Returns the index of the shard that a call with this body goes to."""


class ShardRouter:
    """A sharded gateway's routes. `create_app` returns the ASGI app, whose lifespan owns the shards.

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
        turn = count()
        self._next_shard = lru_cache(4096)(lambda key: next(turn) % len(shards))

    def create_app(self) -> ASGIApp:
        proxy, keyed, forwarded = ReverseProxy(self.fleet), self._keyed, self._forwarded
        routes = [
            Route(path, handler, methods=methods.split())
            for methods, path, handler in (
                ("POST", "/sessions", forwarded(self._shard_to_open)),
                ("GET", "/sessions", keyed(self._sessions)),
                ("GET DELETE", "/sessions/{id}", forwarded(self._shard_of_session)),
                ("GET POST", "/sessions/{id}/{call}", forwarded(self._shard_of_session)),
                ("GET", "/groups", keyed(self._groups)),
                ("GET", "/groups/erased", keyed(self._groups)),
                ("POST", "/groups/erased", keyed(self._acknowledge)),
                ("POST", "/groups/lease", keyed(self._lease)),
                ("POST", "/groups/ack", forwarded(self._shard_of_lease)),
                ("POST", "/groups/{id:path}/seal", forwarded(self._shard_of_group)),
                ("DELETE", "/groups/{id:path}", forwarded(self._shard_of_group)),
                ("GET", "/attempts", keyed(self._attempts)),
                ("POST", "/attempts/leave", self._leave),
                ("GET", "/engines", keyed(self._list_engines)),
                ("POST PATCH DELETE", "/engines", keyed(self._engines)),
                ("GET", "/health", self._health),
                ("GET", "/ready", self._ready),
                ("GET", "/metrics", keyed(self._metrics)),
            )
        ]
        control = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=_ERRORS)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["type"] == "http" else ""
            # A worker leaves all shards at once, as each may have given it attempts.
            proxied = path.startswith(("/v1/", "/s/", "/attempts/")) and path != "/attempts/leave"
            await (proxy if proxied else control)(scope, receive, send)

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

    def _keyed(self, handler: Handler) -> Handler:
        """Checks the key before a handler reads the body."""

        async def endpoint(request: Request) -> Response:
            await self._key(request)
            return await handler(request)

        return endpoint

    # -- calls that go to one shard --------------------------------------------------------------

    def _forwarded(self, choice: ShardChoice) -> Handler:
        """Returns the handler that forwards a call unchanged to the chosen shard.

        The header `Host` has the shard's port, because a new session gets the address that it was opened at.
        """

        async def forward(request: Request) -> Response:
            body = await _body(request)
            index = choice(request, body)
            address = host_of(request.scope, self.fleet.shards[index])
            headers = {**_authorization(request), "Host": address}
            path = request.scope["raw_path"].decode("latin-1")
            return _forward(await self.fleet.call(index, request.method, path, body or None, headers))

        return self._keyed(forward)

    def _shard_to_open(self, _: Request, body: bytes) -> int:
        """The shard of the session's group; without one the next shard, for a repeated call the same."""
        group_id = _field(body, "group_id")
        if group_id is not None:
            return shard_of_group(group_id, len(self.fleet.shards))
        return self._next_shard(_field(body, "key") or new_id())

    def _shard_of_session(self, request: Request, _: bytes) -> int:
        return self._shard_of("session", request.path_params["id"])

    def _shard_of_lease(self, _: Request, body: bytes) -> int:
        return self._shard_of("lease", _field(body, "lease_id") or "")

    def _shard_of(self, kind: str, name: str) -> int:
        index = shard_of_id(name, len(self.fleet.shards))
        if index is None:
            raise GatewayError(f"there is no {kind} {name}", status=404)
        return index

    def _shard_of_group(self, request: Request, _: bytes) -> int:
        return shard_of_group(request.path_params["id"], len(self.fleet.shards))

    # -- calls that go to all shards -------------------------------------------------------------

    async def _groups(self, request: Request) -> Response:
        answers = await self.fleet.call_all("GET", request.url.path, None, _authorization(request))
        return _json({"groups": [row for answer in answers for row in answer.json()["groups"]]})

    async def _sessions(self, request: Request) -> Response:
        """The sessions of all shards; `limit` applies to each shard."""
        path = "/sessions" + (f"?{request.url.query}" if request.url.query else "")
        answers = await self.fleet.call_all("GET", path, None, _authorization(request))
        rows = [answer.json() for answer in answers]
        found = [session for row in rows for session in row.get("sessions", ())]
        return _json({"total": sum(row.get("total", 0) for row in rows), "sessions": found})

    async def _acknowledge(self, request: Request) -> Response:
        body = await _body(request)
        answers = await self.fleet.call_each("POST", request.url.path, body, _authorization(request))
        return _forward(raise_for_status(answers)[0])

    async def _lease(self, request: Request) -> Response:
        body = schemas.read(schemas.Lease, await _body(request))
        leasing = self._leases.lease(body, _authorization(request))
        groups = await unless_disconnected(request.receive, leasing, self._leases.release)
        if groups is None:
            return Response(status_code=499)
        return Response(exact.pack({"groups": groups}), media_type="application/msgpack")

    async def _attempts(self, request: Request) -> Response:
        """The workers of all shards, each once."""
        answers = await self.fleet.call_all("GET", "/attempts", None, _authorization(request))
        rows = [answer.json() for answer in answers]
        workers: dict[str, dict[str, Any]] = {}
        for row in (worker for listed in rows for worker in listed["workers"]):
            total = workers.setdefault(row["worker"], row)
            if total is not row:
                total["running"] += row["running"]
                total["connected"] = total["connected"] or row["connected"]
                total["polling"] = total["polling"] or row["polling"]
                total["seen_s"] = min(total["seen_s"], row["seen_s"])
        return _json({"queued": sum(row["queued"] for row in rows), "workers": list(workers.values())})

    async def _leave(self, request: Request) -> Response:
        """Each shard checks the worker key."""
        body, headers = await _body(request, small=True), _authorization(request)
        rows = [
            answer.json() for answer in await self.fleet.call_all("POST", "/attempts/leave", body, headers)
        ]
        return _json({name: sum(row[name] for row in rows) for name in rows[0]})

    async def _engines(self, request: Request) -> Response:
        body = await _body(request)
        answers = await self.fleet.call_each(request.method, "/engines", body, _authorization(request))
        done = [answer for answer in answers if isinstance(answer, Answer) and answer.status < 400]
        engine = exact.loads(body) if done else {}
        # A shard that did not answer gets the change after its restart.
        if done and request.method != "DELETE":
            row = done[0].json()
            admitted = engine.get("admitted", None if row["admitted"] else False)
            self.fleet.engines[row["url"]] = {
                "url": row["url"],
                "control": row["control"],
                "admitted": admitted,
                "policy": row["policy"],
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


async def _body(request: Request, *, small: bool = False) -> bytes:
    try:
        return bytes(await read_body(request.receive, small=small))
    except ApiError as refusal:
        raise GatewayError(str(refusal), status=refusal.status) from None


def _field(body: bytes, name: str) -> str | None:
    """A string field of a JSON body, or None; the shard reports an invalid body."""
    with contextlib.suppress(ValueError):
        payload = exact.loads(body)
        if isinstance(payload, dict) and isinstance(payload.get(name), str):
            return str(payload[name])
    return None


def _authorization(request: Request) -> dict[str, str]:
    """The caller's Authorization header, which the shard checks."""
    authorization = request.headers.get("authorization")
    return {} if authorization is None else {"Authorization": authorization}


def _forward(answer: Answer) -> Response:
    # OpenAI's SDKs repeat a 409 and a 429 unless this header forbids it.
    headers = {"x-should-retry": "false"} if 400 <= answer.status < 500 else {}
    return Response(answer.body, answer.status, headers, answer.content_type)


def _json(value: Any, status: int = 200) -> Response:
    return Response(exact.dumps(value), status, media_type="application/json")


_ERRORS: dict[Any, Callable[[Request, Any], Response]] = {
    Refused: lambda _, error: _forward(error.answer),
    GatewayError: lambda _, error: error_response(str(error), error.status or 400),
    ClientGone: lambda *_: Response(status_code=499),
    404: lambda request, _: error_response(
        str(
            wrong_address(request.method, request.url.path)
            or f"{request.method} {request.url.path}: there is no such route"
        ),
        404,
    ),
}
