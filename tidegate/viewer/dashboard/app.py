"""The dashboard's server: a page, its files, and one run or several as JSON. It accepts GET only.

Requests contain no paths: they select steps, episodes and turns by number, groups by id, and the page's files
from a fixed table. Text of models, agents and settings is sent as JSON and inserted as text; the content
security policy allows only the page's own scripts.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tidegate.service import exact
from tidegate.service.local_only import is_loopback
from tidegate.service.serve import Listen, run_app
from tidegate.viewer.dashboard import comparison, views
from tidegate.viewer.dashboard.records import NotFound
from tidegate.viewer.dashboard.run import FollowedRun

log = logging.getLogger(__name__)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(run: FollowedRun, host: str = "127.0.0.1") -> FastAPI:
    """Returns the app for one run.

    On a loopback `host` it accepts only loopback host names, which prevents DNS rebinding by other sites.
    """
    app = _empty_app(host, "index.html")
    _serve_data(app, views.VIEWS, run)
    return app


def create_comparison(runs: Sequence[FollowedRun], host: str = "127.0.0.1") -> FastAPI:
    """Returns the app that compares several runs; `/run/N/` is the app of run N, from 0."""
    app = _empty_app(host, "compare.html")
    _serve_data(app, comparison.VIEWS, comparison.ComparedRuns(runs))
    for number, run in enumerate(runs):
        app.mount(f"/run/{number}", create_app(run, host))
    return app


def serve(runs: Sequence[FollowedRun], listen: Listen, sock: Any) -> None:
    """Serves one run, or the comparison of several, on a bound socket until SIGTERM or SIGINT.

    Reads the runs while the browser opens.
    """
    for run in runs:
        threading.Thread(target=run.refresh, daemon=True, name="initial read").start()
    app = create_app(runs[0], listen.host) if len(runs) == 1 else create_comparison(runs, listen.host)
    run_app(app, sock, listen)


def _empty_app(host: str, page: str) -> FastAPI:
    app = FastAPI(title="tidegate view", docs_url=None, redoc_url=None, openapi_url=None)
    _guard(app, loopback=is_loopback(host))
    _refuse(app)
    _serve_page(app, page)
    return app


def _json(value: object, status: int = 200) -> Response:
    return Response(exact.dumps(value), status, media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    return _json({"error": {"message": message}}, status)


def _guard(app: FastAPI, *, loopback: bool) -> None:
    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if loopback and not is_loopback(name):
            response = _refusal(
                400,
                f"host name {name!r} refused: this page is served to this machine only; "
                "open it as http://127.0.0.1 or restart it with --host",
            )
        elif request.method not in ("GET", "HEAD"):
            response = _refusal(405, f"{request.method} is not allowed: the page is read-only; use GET")
        else:
            response = await answer(request)
        response.headers.update(HEADERS)
        return response


def _refuse(app: FastAPI) -> None:
    @app.exception_handler(NotFound)
    async def not_found(_: Request, error: NotFound) -> Response:
        return _refusal(404, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = (f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors())
        return _refusal(422, f"invalid query: {'; '.join(problems)}")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        missing = f"no such path: {request.url.path}"
        return _refusal(error.status_code, missing if error.status_code == 404 else str(error.detail))

    @app.exception_handler(OSError)
    async def unreadable(_: Request, error: OSError) -> Response:
        log.warning("a file of the run could not be read: %s", error)
        return _refusal(503, f"a file of the run could not be read: {error.strerror or error}; try again")


def _serve_page(app: FastAPI, name: str) -> None:
    files = page_files()

    @app.get("/")
    async def page() -> Response:
        return Response(files[name], media_type=TYPES[".html"])

    @app.get("/static/{name}")
    async def static(name: str) -> Response:
        if name not in files:
            return _refusal(404, f"the page has no file {name!r}")
        return Response(files[name], media_type=TYPES[Path(name).suffix])


def page_files() -> dict[str, bytes]:
    """Returns the page's files by name."""
    files = resources.files("tidegate.viewer").joinpath("dashboard", "pages").iterdir()
    return {file.name: file.read_bytes() for file in files if Path(file.name).suffix in TYPES}


def _serve_data(app: FastAPI, data: Mapping[str, Callable[..., views.Wire]], source: object) -> None:
    for name, view in data.items():
        app.get(f"/api/{name}")(_route(view, source))


def _route(view: Callable[..., views.Wire], source: object) -> Callable[..., Response]:
    """Returns a route whose query has the view's parameters after the first one, `source`."""
    signature = inspect.signature(view, eval_str=True)
    _, *query = signature.parameters.values()

    def route(**values: Any) -> Response:
        return _json(view(source, **values))

    route.__signature__ = signature.replace(parameters=query, return_annotation=Response)  # type: ignore[attr-defined]
    return route
