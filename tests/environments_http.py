"""Environments that outlast a gateway process: hosted in the test process, called over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from tests.environments import LocalEnvironments
from tests.http_app import served_app
from tidegate.gateway.environments.base import EnvironmentInfo, EpisodeLostError, Response, ToolResult
from tidegate.types import Message, Scored, Task, Trajectory, fields_of


class HttpEnvironments:
    """The gateway's side; it can be passed to another process."""

    def __init__(self, url: str, infos: Mapping[str, EnvironmentInfo]) -> None:
        self.url = url
        self._infos = infos

    async def start(self) -> None: ...

    def info(self, env: str) -> EnvironmentInfo | None:
        return self._infos.get(env)

    async def setup(self, episode: str, task: Task, deadline_s: float, create: bool = True) -> None:
        await self._call("setup", episode, task.to_wire(), deadline_s, create)

    async def call_tool(
        self, episode: str, name: str, arguments: Mapping[str, Any], key: str | None = None
    ) -> ToolResult:
        return ToolResult(**await self._call("call_tool", episode, name, dict(arguments), key))

    async def respond(self, episode: str, reply: Message, key: str | None = None) -> Response:
        return Response(**await self._call("respond", episode, reply, key))

    async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
        raise NotImplementedError

    async def teardown(self, episode: str) -> None:
        await self._call("teardown", episode)

    async def close(self) -> None: ...

    async def _call(self, name: str, *arguments: Any) -> Any:
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/{name}", json=arguments) as answer:
            if answer.status != 200:
                raise EpisodeLostError(await answer.text())
            return await answer.json()


@contextlib.asynccontextmanager
async def hosted(service: LocalEnvironments, *names: str) -> AsyncIterator[HttpEnvironments]:
    """Serves the environments `names` of a service; yields what a gateway process calls them with."""

    async def answer(request: web.Request) -> web.Response:
        name, arguments = request.match_info["name"], await request.json()
        if name == "setup":
            arguments[1] = Task(**arguments[1])
        try:
            result = await getattr(service, name)(*arguments)
        except EpisodeLostError as error:
            return web.Response(text=str(error), status=410)
        return web.json_response(None if result is None else fields_of(result))

    app = web.Application()
    app.router.add_post("/{name}", answer)
    infos = {name: info for name in names if (info := service.info(name)) is not None}
    async with served_app(app) as url:
        yield HttpEnvironments(url, infos)
