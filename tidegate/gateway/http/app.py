"""Builds the gateway's HTTP app: the control plane's routes and the data plane's endpoints."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate import __version__
from tidegate.errors import GatewayError
from tidegate.gateway.clients.conversations import Conversations
from tidegate.gateway.clients.groups import ClientGroups
from tidegate.gateway.errors import ApiError, wrong_address
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import attempts, clients, endpoints, openapi, schemas, tools
from tidegate.gateway.http.base import count, error_response, replay, unless_disconnected
from tidegate.gateway.metrics import PREFIX
from tidegate.gateway.sessions.session import SessionRequest
from tidegate.gateway.turns.request_reader import ClientGone, read_body
from tidegate.prometheus import counter, exposition, gauge, metrics_of
from tidegate.service.api_key import ApiKey
from tidegate.types import Trajectory, to_wire


class GatewayApp:
    """The ASGI app of one gateway; its lifespan starts and closes the gateway.

    The data plane bypasses FastAPI, whose overhead exceeds the work of a call.
    """

    def __init__(self, gateway: Gateway) -> None:
        groups, conversations, mcp = ClientGroups(gateway), Conversations(gateway), tools.McpServer(gateway)
        self._control = _control_plane(gateway, groups, conversations, mcp)
        routes = endpoints.routes(gateway, conversations)
        routes += [attempts.finish_route(gateway), *tools.routes(gateway, mcp)]
        routes += clients.routes(gateway, groups, conversations)
        self._data = Router(routes, default=AuthMiddleware(gateway, self._control))
        self._workers = Router(attempts.routes(gateway), default=self._data)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The lifespan, which the control plane's app runs.
            await self._control(scope, receive, send)
        elif scope["path"].startswith("/attempts/"):
            await self._workers(scope, receive, send)
        else:
            await self._data(scope, receive, send)


def create_app(gateway: Gateway) -> GatewayApp:
    """Returns the app of one gateway."""
    return GatewayApp(gateway)


class AuthMiddleware:
    """Checks the admin key, then reads the body with limits, before the control plane handles a request."""

    def __init__(self, gateway: Gateway, control: ASGIApp) -> None:
        self._admin = ApiKey(
            gateway.options.admin_key,
            lambda: GatewayError("this route needs the gateway's admin key", status=401),
        )
        self._metrics = gateway.metrics
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        try:
            if (wrong := wrong_address(scope["method"], path)) is not None:
                count(self._metrics, wrong)
                raise wrong
            if path not in _OPEN:
                self._admin.check(headers.get(b"authorization", b"").decode("latin-1"))
            body = await read_body(receive, small=path in _OPEN)
        except ClientGone:
            return
        except (GatewayError, ApiError) as refusal:
            await error_response(str(refusal), refusal.status)(scope, receive, send)
            return
        await self._control(scope, replay(body, receive), send)


_OPEN = frozenset({"/health", "/ready", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"})
"""Paths that need no key."""


def _control_plane(
    gateway: Gateway, groups: ClientGroups, conversations: Conversations, mcp: tools.McpServer
) -> FastAPI:

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        conversations.start()
        try:
            yield
        finally:
            await mcp.close()
            await conversations.close()
            await gateway.close()

    app = ControlPlane(title="Tidegate gateway", version=__version__, lifespan=lifespan)
    _add_errors(app)
    _add_sessions(app, gateway)
    _add_groups(app, gateway, groups)
    _add_engines(app, gateway)
    _add_health(app, gateway)
    return app


class ControlPlane(FastAPI):
    """FastAPI whose OpenAPI document includes the data plane."""

    def openapi(self) -> dict[str, Any]:
        self.openapi_schema = self.openapi_schema or openapi.describe(self)
        return self.openapi_schema


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        return error_response(str(error), error.status or 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(schemas.explain(error.errors()), 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        refusal = error_response(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
        refusal.headers.update(error.headers or {})
        return refusal

    @app.exception_handler(Exception)  # the server logs it
    async def failed(request: Request, error: Exception) -> Response:
        where = f"{request.method} {request.url.path}"
        return error_response(f"{where} failed with {type(error).__name__}; the gateway's log has it", 500)


def _add_sessions(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/sessions")
    async def open_session(request: Request, body: SessionRequest) -> dict[str, str]:
        session, key = await gateway.open_session(body)
        root = gateway.options.public_url or str(request.base_url).rstrip("/")
        return schemas.access_row(session.id, key, root)

    @app.get("/sessions")
    async def list_sessions(
        state: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> dict[str, Any]:
        found = [session for session in gateway.sessions.all() if state in (None, session.state)]
        # The newest ones: a gateway that has served for days keeps many ended sessions.
        return {"total": len(found), "sessions": [schemas.session_row(one) for one in found[-limit:]]}

    @app.get("/sessions/{session_id}")
    async def show_session(session_id: str) -> dict[str, Any]:
        return schemas.session_row(gateway.session(session_id))

    @app.delete("/sessions/{session_id}")
    async def delete_session(session_id: str) -> dict[str, str]:
        await gateway.delete_session(session_id)
        return {}

    @app.post("/sessions/{session_id}/reward")
    async def post_reward(session_id: str, body: schemas.PostReward) -> dict[str, str]:
        await gateway.post_reward(session_id, body.name, body.value, body.turn)
        return {}

    @app.post("/sessions/{session_id}/finish", responses=openapi.FINISHING)
    async def finish(session_id: str, body: schemas.Finish) -> Response:
        trajectory = await gateway.finish(session_id, body.report(), body.trainer_epoch, body.wait_s)
        return _result(session_id, trajectory)

    @app.get("/sessions/{session_id}/result", responses=openapi.FINISHING)
    async def result(
        session_id: str, wait_s: Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)] = 0.0
    ) -> Response:
        return _result(session_id, await gateway.result(session_id, wait_s))

    def _result(session_id: str, trajectory: Trajectory | None) -> Response:
        if trajectory is None:
            row = {"session_id": session_id, "state": gateway.session(session_id).state}
            return Response(orjson.dumps(row), 202, media_type="application/json")
        return Response(orjson.dumps(schemas.summary_row(trajectory)), media_type="application/json")

    @app.get("/attempts")
    async def list_attempts() -> dict[str, Any]:
        return {"queued": gateway.attempts.queued, "workers": gateway.attempts.workers()}

    @app.get("/sessions/{session_id}/trajectory", response_class=openapi.Msgpack)
    async def trajectory(session_id: str) -> Response:
        result = gateway.session(session_id).trajectory
        if result is None:
            raise GatewayError(f"session {session_id} is not finished", status=400)
        return openapi.Msgpack(to_wire(result))


def _add_groups(app: FastAPI, gateway: Gateway, clients: ClientGroups) -> None:
    @app.get("/groups")
    async def list_groups() -> dict[str, Any]:
        return {"groups": schemas.group_rows(gateway.sessions, gateway.groups)}

    @app.get("/groups/erased")
    async def erased_groups() -> dict[str, list[str]]:
        return {"groups": gateway.groups.erased()}

    @app.post("/groups/erased")
    async def acknowledge_erasures(body: schemas.AcknowledgeErasures) -> dict[str, str]:
        await gateway.groups.acknowledge_erasures(body.groups)
        return {}

    @app.post("/groups/end")
    async def end_run(body: schemas.EndRun) -> dict[str, str]:
        await clients.end_run(body.trainer_epoch, body.why)
        return {}

    @app.post("/groups/lease", response_class=openapi.Msgpack)
    async def lease(request: Request, body: schemas.Lease) -> Response:
        groups = await unless_disconnected(
            request.receive,
            gateway.groups.lease(body.trainer_epoch, body.max, body.wait_s, body.key),
            lambda leased: gateway.groups.release([group.lease_id for group in leased]),
        )
        return Response(status_code=499) if groups is None else openapi.Msgpack(to_wire({"groups": groups}))

    @app.post("/groups/ack")
    async def ack(body: schemas.Ack) -> dict[str, str]:
        await gateway.ack(body.trainer_epoch, body.lease_id, body.outcome, body.why)
        return {}

    @app.post("/groups/wait")
    async def wait_ready(body: schemas.WaitReady) -> dict[str, int]:
        return {"ready": await gateway.groups.wait(body.trainer_epoch, body.wait_s)}

    @app.post("/groups/return")
    async def give_back(body: schemas.GiveBack) -> dict[str, str]:
        await gateway.groups.release(body.lease_ids)
        return {}

    @app.post("/groups/{group_id:path}/seal")
    async def seal(group_id: str, body: schemas.Seal) -> dict[str, bool]:
        sealed = await gateway.seal(group_id, body.task_id, body.sessions, body.trainer_epoch, body.wait_s)
        return {"sealed": sealed}

    @app.delete("/groups/{group_id:path}", response_class=openapi.Msgpack)
    async def drop(group_id: str, body: schemas.Drop | None = None) -> Response:
        body = body or schemas.Drop()
        recorded = await gateway.drop(group_id, body.trainer_epoch, body.why)
        return openapi.Msgpack(to_wire({"trajectories": recorded}))


def _add_engines(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/engines")
    async def list_engines() -> dict[str, Any]:
        return {"engines": [engine.to_wire() for engine in gateway.pool.engines()]}

    @app.post("/engines")
    async def add_engine(body: schemas.AddEngine) -> dict[str, Any]:
        return (await gateway.engines.add(body.url, body.control, body.admitted, body.policy)).to_wire()

    @app.patch("/engines")
    async def admit_engine(body: schemas.AdmitEngine) -> dict[str, Any]:
        return (await gateway.engines.admit(body.url, body.admitted)).to_wire()

    @app.put("/engines/candidate")
    async def set_candidate(body: schemas.SetCandidate) -> dict[str, str]:
        gateway.engines.set_candidate(body.engines, body.share)
        return {}

    @app.delete("/engines")
    async def remove_engine(body: schemas.EngineUrl) -> dict[str, str]:
        await gateway.engines.remove(body.url)
        return {}


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        if gateway.failed is None:
            return {"instance": gateway.instance, "status": "ok"}
        response.status_code = 503
        return {"instance": gateway.instance, "status": "failed", "reason": gateway.failed}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, bool]:
        serving = {engine.policy for engine in gateway.pool.engines() if engine.serves}
        ready = serving >= gateway.policies.engine_sets
        if not ready:
            response.status_code = 503
        return {"ready": ready}

    @app.get("/metrics", response_class=openapi.Exposition)
    async def metrics() -> Response:
        return openapi.Exposition(exposition(collect(gateway)))


_ACKS = frozenset({"trained", "stepped", "stale", "filtered", "failed", "cancelled"})


def collect(gateway: Gateway) -> Iterator[Metric]:
    """Yields all metrics of a gateway, for Prometheus."""
    metrics, groups, pool = gateway.metrics, gateway.groups, gateway.pool
    engines = pool.engines()
    sessions = gateway.sessions.all()
    states = Counter(session.state for session in sessions)
    conversations = sum(session.conversation is not None and session.ending is None for session in sessions)
    group_states = Counter(row["state"] for row in schemas.group_rows(gateway.sessions, groups))
    acked: Counter[str] = Counter()
    for outcome, number in groups.acked.items():  # any text: bound the number of labels
        acked[outcome if outcome in _ACKS else "other"] += number
    ratio = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
    yield from metrics_of(PREFIX, metrics)
    yield gauge("tidegate_cache_hit_ratio", ratio)
    renderers = list(gateway.policies.renderers())
    yield counter(f"{PREFIX}_shielded_requests", sum(one.escaped_requests for one in renderers))
    yield counter(f"{PREFIX}_dropped_frames", sum(one.invalidated_templates for one in renderers))
    yield gauge(f"{PREFIX}_sessions", states, "state")
    yield gauge(f"{PREFIX}_groups", group_states, "state")
    yield gauge(f"{PREFIX}_conversations", conversations)
    yield counter(f"{PREFIX}_groups_sealed", groups.sealed)
    yield counter(f"{PREFIX}_groups_acked", acked, "outcome")
    yield gauge(f"{PREFIX}_attempts_queued", gateway.attempts.queued)
    yield gauge(f"{PREFIX}_workers", sum(row["connected"] for row in gateway.attempts.workers()))
    yield gauge(f"{PREFIX}_engines", Counter(engine.state for engine in engines), "state")
    yield gauge(f"{PREFIX}_engine_healthy", {engine.url: engine.healthy for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_engine_calls", {engine.url: engine.busy for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_engine_limit", {engine.url: engine.limit for engine in engines}, "engine")
    yield gauge(f"{PREFIX}_waiting_calls", pool.waiting)
    yield counter(f"{PREFIX}_engine_errors", pool.errors)
    yield counter(f"{PREFIX}_continued_calls", pool.continued)
