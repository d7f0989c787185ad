"""Client of environment services: `EnvironmentService` over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from tidegate.errors import RewardError, RewardUnavailableError, StartError, UnrewardedError
from tidegate.gateway.environments.base import EnvironmentInfo, EpisodeLostError, Response, ToolResult
from tidegate.service import exact
from tidegate.service.backoff import back_off
from tidegate.service.http_client import HttpClient, RedirectError, bearer
from tidegate.service.service import LOOPBACK, Service
from tidegate.types import Message, Scored, Task, Trajectory, to_wire

log = logging.getLogger("tidegate.gateway.environments.client")

SILENT_S = 30.0
"""Time without a byte of a response after which a request is repeated; services send padding more often."""
UNAVAILABLE_S = 60.0
"""Time for which a request is repeated while its service does not respond."""
MOST_BROKEN = 5
"""Connections lost during a response after which a request fails, as the request may crash the service."""
FIRST_S, LONGEST_S = 0.05, 2.0
RESTART_S, LONGEST_RESTART_S = 0.1, 30.0
"""Delays before an own service is started again."""
_PADDING = b"\xc0"


class EnvironmentClient(HttpClient):
    """The environments of one or several services, which all serve the same ones.

    An episode belongs to the service that its name selects, also after a restart of this process.

    Args:
        urls: Addresses of the services.
        key: Their key; None: they have none.
    """

    def __init__(self, urls: Sequence[str], key: str | None = None) -> None:
        super().__init__(key)
        self._urls = [url.rstrip("/") for url in urls]
        self._key = key
        self._infos: dict[str, EnvironmentInfo] = {}

    async def start(self) -> None:
        """Reads which environments there are. Raises StartError."""
        for url in self._urls:
            try:
                about = await self._request("GET", f"{url}/environments", {}, UNAVAILABLE_S)
            except EpisodeLostError as error:
                raise StartError(f"the environment service at {url}: {error}") from None
            infos = msgspec.convert(about["result"], dict[str, EnvironmentInfo])
            if self._infos and infos != self._infos:
                raise StartError(
                    f"the environment services at {self._urls[0]} and {url} serve different environments "
                    f"({', '.join(self._infos)}; {', '.join(infos)}): start both with the same one"
                )
            self._infos = infos

    def info(self, env: str) -> EnvironmentInfo | None:
        return self._infos.get(env)

    async def setup(self, episode: str, task: Task, deadline_s: float, create: bool = True) -> None:
        body = {"task": _json(task), "deadline_s": deadline_s, "create": create}
        self._result(await self._request("PUT", self._path(episode), body))

    async def call_tool(
        self, episode: str, name: str, arguments: Mapping[str, Any], key: str | None = None
    ) -> ToolResult:
        body = {"name": name, "arguments": dict(arguments), "key": key or secrets.token_hex(8)}
        answer = await self._request("POST", self._path(episode, "/tool"), body)
        if answer.get("kind") == "timeout":
            return ToolResult(f"{name}: {answer['error']} (env.call_timeout_s)", error=True)
        return ToolResult(**self._result(answer))

    async def respond(self, episode: str, reply: Message, key: str | None = None) -> Response:
        body = {"reply": reply, "key": key or secrets.token_hex(8)}
        return Response(**self._result(await self._request("POST", self._path(episode, "/respond"), body)))

    async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
        info = self._infos[trajectory.env]
        body = {"task": _json(task), "trajectory": to_wire(trajectory), "stateful": info.stateful}
        answer = await self._request("POST", self._path(episode, "/score"), body)
        if answer.get("kind") == "unrewarded":
            raise UnrewardedError(answer["error"])
        return msgspec.convert(self._rewards(answer), Scored)

    async def rank(self, group: str, task: Task, trajectories: Sequence[Trajectory]) -> list[Scored]:
        body = {"task": _json(task), "trajectories": [to_wire(trajectory) for trajectory in trajectories]}
        url = self._urls[zlib.crc32(group.encode()) % len(self._urls)]
        answer = await self._request("POST", f"{url}/groups/{quote(group, safe='')}/rank", body)
        return msgspec.convert(self._rewards(answer), list[Scored])

    async def teardown(self, episode: str) -> None:
        try:
            self._result(await self._request("DELETE", self._path(episode), {}))
        except EpisodeLostError as error:
            log.warning("episode %s: teardown: %s", episode, error)

    def _path(self, episode: str, path: str = "") -> str:
        url = self._urls[zlib.crc32(episode.encode()) % len(self._urls)]
        name = quote(episode, safe="") or "-"  # an endpoint's evaluation has no sessions, and no states
        return f"{url}/episodes/{name}{path}"

    def _rewards(self, answer: Mapping[str, Any]) -> Any:
        if answer.get("kind") == "reward":
            raise RewardError(answer["error"], answer.get("metrics"))
        if answer.get("kind") == "unavailable":
            raise RewardUnavailableError(answer["error"], answer.get("metrics"))
        return self._result(answer)

    @staticmethod
    def _result(answer: Mapping[str, Any]) -> Any:
        if "error" in answer:
            raise EpisodeLostError(answer["error"])
        return answer["result"]

    async def _request(
        self, method: str, url: str, body: Mapping[str, Any], within_s: float = UNAVAILABLE_S
    ) -> dict[str, Any]:
        """Sends a request, again while the service does not respond, and returns its answer.

        Every request may be repeated: a service returns the first result. Raises EpisodeLostError.
        """
        data = exact.pack(body)
        failures, broken, until = 0, 0, time.monotonic() + within_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENT_S)
        while True:
            responds = False
            try:
                async with self.http.request(
                    method, url, data=data, headers=bearer(self._key), timeout=timeout
                ) as response:
                    responds = True
                    content = await response.read()
                if response.status != 200:
                    raise EpisodeLostError(f"{url}: status {response.status}: {content[:200].decode()}")
                answer: dict[str, Any] = exact.unpack(content.lstrip(_PADDING))
                return answer
            except RedirectError as error:
                raise EpisodeLostError(str(error)) from None
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                if responds:  # it was there until now, perhaps for longer than `within_s`
                    failures, broken, until = 0, broken + 1, time.monotonic() + within_s
                if time.monotonic() > until or broken > MOST_BROKEN:
                    what = f"{type(error).__name__}: {error}"
                    how = f"did not respond for {within_s:g} s"
                    if broken > MOST_BROKEN:
                        how = f"broke off {broken} responses"
                    raise EpisodeLostError(f"the environment service at {url} {how}: {what}") from None
                failures = await back_off(failures, FIRST_S, LONGEST_S)


def _json(task: Task) -> str:
    """Returns a task as JSON, which has integers of any size. Values that it lacks become texts."""
    return json.dumps(task.to_wire(), default=str)


class OwnedEnvironments(EnvironmentClient):
    """A client with a service of its own, `tidegate env serve`, which is started again when it exits.

    A gateway without a run starts it for itself.

    Args:
        arguments: Arguments of the service.
        environment: What is passed to it as secrets: the environment's `options`, and others.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, Any]) -> None:
        key = secrets.token_urlsafe(24)
        super().__init__([], key)
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-env-")
        self._service = Service(
            "env",
            lambda: ["serve", *arguments],
            Path(self._directory.name),
            secrets={"key": key, **environment},
            shares_log=True,
            host=LOOPBACK,
        )
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the service; a second call has no effect. Raises StartError."""
        if self._keeping is not None:  # a second service would serve at the same socket, with other states
            return
        self._urls = [await self._service.start()]
        self._keeping = asyncio.create_task(self._keep(), name="environment service")
        await super().start()

    async def _keep(self) -> None:
        while True:
            why: str | None = await self._service.wait_for_exit()
            failures = 0
            while why is not None:
                log.error("%s; starting it again", why)
                failures = await back_off(failures, RESTART_S, LONGEST_RESTART_S)
                try:
                    await self._service.restart()
                    why = None
                except (StartError, OSError) as error:
                    why = str(error)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        await self._service.stop()
        await asyncio.to_thread(self._directory.cleanup)
        await super().close()
