"""HTTP routes of the retrieval server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.errors import ConfigError, RetrievalError, RetrievalRefused, StartError
from tidegate.prometheus import CONTENT_TYPE, exposition
from tidegate.rag.client import RAG_KEY
from tidegate.rag.server.schemas import SearchRequest, Write, parse, read_reload, read_retrieve, read_search
from tidegate.rag.server.service import RagOptions, Retrieval
from tidegate.service.api_key import ApiKey
from tidegate.service.serve import Listen, bind, run_app

MAX_BODY = 16 * 2**20
BODY_S = 60.0
"""Seconds in which a client must send its body."""
Read = Callable[[dict[str, Any]], tuple[SearchRequest, Write]]


def serve(options: RagOptions, listen: Listen) -> None:
    """Serves until the process is stopped. Raises ConfigError or StartError if it cannot start."""
    if listen.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
        raise ConfigError(
            f"the retrieval server would be open to all on {listen.host}: set {RAG_KEY} or listen on loopback"
        )
    failed: list[str] = []

    def end(why: str) -> None:
        failed.append(why)
        os.kill(os.getpid(), signal.SIGINT)

    sock = bind(listen)
    run_app(create_app(Retrieval(options, on_failure=end)), sock, listen, keyless=options.api_key is None)
    if failed:
        raise StartError(failed[0])


def create_app(retrieval: Retrieval) -> FastAPI:
    """Returns the app of one server; its lifespan starts and closes the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await retrieval.start()
        try:
            yield
        finally:
            await retrieval.close()

    app = FastAPI(title="Tidegate retrieval", lifespan=lifespan)
    key = ApiKey(retrieval.options.api_key, _wrong_key)
    _add_errors(app, retrieval)
    routes: dict[str, Read] = {
        "/v1/search": read_search,
        "/retrieve": lambda payload: read_retrieve(payload, retrieval.method),
    }
    for path, read in routes.items():
        app.router.routes.append(Route(path, Search(retrieval, key, path, read), methods=["POST"]))
    _add_routes(app, retrieval, [Depends(key)])
    return app


def _wrong_key() -> RetrievalRefused:
    return RetrievalRefused(
        "this route needs the retrieval server's key in the Authorization header",
        status=401,
        code="wrong_key",
    )


class Search:
    """Route of searches; plain ASGI, because it is hot and must detect that the client has disconnected."""

    def __init__(self, retrieval: Retrieval, key: ApiKey, route: str, read: Read) -> None:
        self._retrieval = retrieval
        self._key = key
        self._route = route
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        metrics = self._retrieval.metrics
        metrics.requests[self._route] += 1
        try:
            headers = dict(scope["headers"])
            self._key.check(headers.get(b"authorization", b"").decode("latin-1"))
            body = await _read_body(receive)
            if body is None:
                return
            search, write = self._read(parse(body))
            answer = await self._answer(search, write, receive)
        except RetrievalError as error:
            metrics.errors[error.code] += 1
            await _respond(send, error.status, error_body(error.status, error.code, str(error)))
            return
        if answer is not None:
            await _respond(send, 200, answer)
            metrics.request_seconds.observe(time.monotonic() - began)

    async def _answer(self, request: SearchRequest, write: Write, receive: Receive) -> bytes | None:
        """Returns the body of the answer, or None if the client has disconnected."""
        search = asyncio.ensure_future(self._retrieval.search(request.queries, request.k, request.mode))
        disconnected = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((search, disconnected), return_when=asyncio.FIRST_COMPLETED)
            return orjson.dumps(write(search.result())) if search.done() else None
        finally:
            disconnected.cancel()
            search.cancel()
            await asyncio.gather(search, disconnected, return_exceptions=True)


async def _read_body(receive: Receive) -> bytes | None:
    """Returns the body, or None if the client has disconnected. Raises RetrievalRefused above MAX_BODY, or
    after BODY_S."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _receive_body(receive)
    except TimeoutError:
        why = f"the body did not arrive within {BODY_S:g} s; send it without a pause"
        raise RetrievalRefused(why, status=408, code="body_too_slow") from None


async def _receive_body(receive: Receive) -> bytes | None:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise RetrievalRefused(
                f"the body is larger than {MAX_BODY} bytes; split the request",
                status=413,
                code="body_too_large",
            )
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, code: str, message: str) -> bytes:
    kind = "retrieval_unavailable" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": code}})


def _add_errors(app: FastAPI, retrieval: Retrieval) -> None:
    def answer(status: int, code: str, message: str) -> Response:
        retrieval.metrics.errors[code] += 1
        return Response(error_body(status, code, message), status, media_type="application/json")

    @app.exception_handler(RetrievalError)
    async def failed(_: Request, error: RetrievalError) -> Response:
        return answer(error.status, error.code, str(error))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return answer(
            error.status_code, "no_such_route", f"{request.method} {request.url.path}: {error.detail}"
        )


def _add_routes(app: FastAPI, retrieval: Retrieval, guarded: list[Any]) -> None:
    @app.get("/v1/documents/{id:path}", dependencies=guarded)
    async def document(id: str) -> Response:
        content = orjson.dumps(await retrieval.document(id))
        return Response(content, media_type="application/json")

    @app.post("/admin/reload", dependencies=guarded)
    async def reload(request: Request) -> dict[str, int]:
        body = await _read_body(request.receive)
        return {"documents": await retrieval.reload(read_reload(body or b""))}

    @app.get("/info", dependencies=guarded)
    async def info() -> dict[str, Any]:
        return retrieval.info

    @app.get("/metrics", dependencies=guarded)
    async def metrics() -> Response:
        return Response(exposition(retrieval.collect()), media_type=CONTENT_TYPE)

    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        error = retrieval.health_error
        if error is None:
            return {"status": "ok"}
        response.status_code = 503
        return {"status": "failed", "reason": error}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, bool]:
        if not retrieval.ready:
            response.status_code = 503
        return {"ready": retrieval.ready}
