"""Clients of models, tools, environments and retrieval, whose server redirects them to an address inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from examples.service.database import Database
from examples.service.model_user import ModelUser
from examples.service.scenario import UserScenario
from tests.http_app import served_app
from tidegate.agents.refine import Refiner
from tidegate.envs.adapters.mcp import McpConnection, McpServerError
from tidegate.envs.adapters.openenv import OpenEnvError, RemoteGame
from tidegate.envs.base import load_environment
from tidegate.envs.judge.judge import RewardJudge
from tidegate.errors import ConfigError, InfrastructureError, RetrievalUnavailable, RewardUnavailableError
from tidegate.gateway.environments.base import EpisodeLostError
from tidegate.gateway.environments.client import EnvironmentClient
from tidegate.rag.client import SearchClient
from tidegate.settings.judge import JudgeSettings
from tidegate.types import Outcome, Task, Trajectory


@dataclass
class Site:
    """A server that redirects each request, and the one that it redirects to."""

    outside: str
    inside: str
    requests: list[str] = field(default_factory=list)
    """Paths of the requests that reached the inside."""
    redirected: int = 0

    def names(self, path: str) -> str:
        """A pattern of an error that names both addresses."""
        return f"{self.outside}/{path} was redirected to {self.inside}/secret, which is not followed"


@pytest.fixture(params=[301, 302, 303, 307, 308])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async def answer(asked: web.Request) -> web.Response:
        made.requests.append(asked.path)
        return web.json_response({})

    async def redirect(_: web.Request) -> web.Response:
        made.redirected += 1
        return web.Response(status=request.param, headers={"Location": f"{made.inside}/secret"})

    apps = [web.Application(), web.Application()]
    for app, handler in zip(apps, (answer, redirect), strict=True):
        app.router.add_route("*", "/{path:.*}", handler)
    async with served_app(apps[0]) as inside, served_app(apps[1]) as outside:
        made = Site(outside, inside)
        yield made
    assert made.requests == []


async def test_a_judge_is_not_followed_and_not_called_again(site: Site) -> None:
    settings = JudgeSettings.model_validate(
        {"url": site.outside, "model": "m", "kind": "score", "rubric": "r"}
    )
    judge = RewardJudge(settings)
    ended = Trajectory("s", "t", "e", "train", Outcome.COMPLETED, [], output="1")
    with pytest.raises(RewardUnavailableError, match=site.names("chat/completions")):
        await judge.score(Task("t", "e", [{"role": "user", "content": "?"}]), ended, None)
    await judge.close()
    assert site.redirected == 1


async def test_an_environment_service_is_not_followed_and_not_asked_again(site: Site) -> None:
    async with EnvironmentClient([site.outside], "key") as environments:
        with pytest.raises(EpisodeLostError, match=site.names("episodes/e/respond")):
            await environments.respond("e", {"role": "assistant"})
    assert site.redirected == 1


async def test_a_retrieval_server_is_not_followed(site: Site) -> None:
    async with SearchClient([site.outside], "key", timeout_s=0.2) as retrieval:
        with pytest.raises(RetrievalUnavailable, match=site.names("v1/search")):
            await retrieval.search("who?")


async def test_an_openenv_server_is_not_followed(site: Site) -> None:
    with pytest.raises(ConfigError, match=site.names("schema")):
        await asyncio.to_thread(load_environment, f"openenv:{site.outside}", {})
    with pytest.raises(OpenEnvError, match=site.names("ws")):
        await RemoteGame.connect(site.outside)


async def test_a_refinement_model_is_not_followed(site: Site) -> None:
    refiner = Refiner([site.outside], "m", attempts=2)
    with pytest.raises(InfrastructureError, match=site.names("chat/completions")):
        await refiner.refine("who?", "who", "results")
    assert site.redirected == 2


async def test_the_model_of_a_simulated_user_is_not_followed(site: Site) -> None:
    user = ModelUser(site.outside, "m", attempts=1)
    with pytest.raises(InfrastructureError, match=site.names("chat/completions")):
        await user.answer(UserScenario(Database({}, {}, {}), "", "", (), False, False, False), [])


async def test_an_mcp_server_is_not_followed(site: Site) -> None:
    with pytest.raises(McpServerError, match=site.names("mcp")):
        await McpConnection(f"{site.outside}/mcp", None).open()
