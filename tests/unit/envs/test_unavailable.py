"""Failures of a judge or another service that a reward calls, over the real client libraries."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.http_app import served_app
from tidegate.envs.rewards import Reward
from tidegate.envs.unavailable import is_unavailable
from tidegate.errors import InfrastructureError, RewardError, RewardUnavailableError


def with_urllib(url: str) -> None:
    urllib.request.urlopen(url, timeout=0.5).read()


def with_openai(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url, api_key="none", timeout=0.5, max_retries=0)
    client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "?"}])


def with_anthropic(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=0.5, max_retries=0)
    client.messages.create(model="judge", max_tokens=1, messages=[{"role": "user", "content": "?"}])


def with_httpx(url: str) -> None:
    pytest.importorskip("httpx").post(url, timeout=0.5).raise_for_status()


def with_requests(url: str) -> None:
    pytest.importorskip("requests").post(url, timeout=0.5).raise_for_status()


def with_aiohttp(url: str) -> None:
    async def call() -> None:
        timeout = aiohttp.ClientTimeout(sock_connect=0.5, sock_read=0.5)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url) as response:
            response.raise_for_status()

    asyncio.run(call())


CLIENTS = [with_urllib, with_openai, with_anthropic, with_httpx, with_requests, with_aiohttp]


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def error_of(call: Callable[[str], None], url: str) -> RewardError:
    def reward(output: str | None) -> float:
        call(url)
        return 1.0

    with pytest.raises(RewardError) as raised:
        Reward("judge", reward).grade({"output": ""})
    return raised.value


@pytest.mark.parametrize("call", CLIENTS)
def test_a_service_that_is_not_there(call: Callable[[str], None]) -> None:
    assert isinstance(error_of(call, closed_port()), RewardUnavailableError)


@pytest.mark.parametrize("call", CLIENTS)
@pytest.mark.parametrize(
    ("status", "unavailable"), [(500, True), (503, True), (429, True), (400, False), (404, False)]
)
async def test_a_status(call: Callable[[str], None], status: int, unavailable: bool) -> None:
    app = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "?"}}, status=status)

    app.router.add_route("*", "/{path:.*}", answer)
    async with served_app(app) as url:
        error = await asyncio.to_thread(error_of, call, url)
    assert isinstance(error, RewardUnavailableError) == unavailable


@pytest.mark.parametrize("call", [with_openai, with_anthropic, with_httpx, with_requests, with_aiohttp])
async def test_a_service_that_does_not_answer(call: Callable[[str], None]) -> None:
    app, over = web.Application(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    app.router.add_route("*", "/{path:.*}", hang)
    async with served_app(app) as url:
        error = await asyncio.to_thread(error_of, call, url)
        over.set()
    assert isinstance(error, RewardUnavailableError)


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "unavailable"),
    [
        (InfrastructureError("the sandboxes are gone"), True),
        (_raised(ValueError("no verdict"), InfrastructureError("gone")), True),
        (socket.gaierror(-2, "Name or service not known"), True),
        (ValueError("no verdict"), False),
        (ZeroDivisionError(), False),
        (TimeoutError("the program did not end"), False),
        (subprocess.TimeoutExpired("verify", 1.0), False),
        (FileNotFoundError("tests.py"), False),
    ],
)
def test_other_errors(error: Any, unavailable: bool) -> None:
    assert is_unavailable(error) == unavailable


def test_a_cause_that_is_its_own_cause_is_read_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_unavailable(first)
