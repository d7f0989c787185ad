"""Engines that join while a trainer controls the gateway get no calls before they are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes import FakeEngine, Fault, Stage, eventually, staged
from tests.integration.gateway.test_faults import FAST, ask, opened
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import GatewayError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.options import GatewayOptions


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny"), pool=FAST) as made:
        yield made


async def another(stage: Stage, version: str = "0") -> FakeEngine:
    engine = FakeEngine(stage.engine.decode, stop_id=2, version=version)
    await engine.start()
    stage.stack.push_async_callback(engine.stop)
    stage.stack.callback(engine.release)
    return engine


async def row(stage: Stage, engine: FakeEngine) -> dict[str, Any]:
    return next(one for one in await stage.client.list_engines() if one["url"] == engine.url)


async def until_version(stage: Stage, engine: FakeEngine) -> None:
    """Until the gateway has seen what the engine attests."""
    await eventually(
        lambda: (known := stage.gateway.pool.get(engine.url)) and known.weight_version == str(engine.version)
    )


async def test_without_a_trainer_an_engine_that_joins_serves_at_once(stage: Stage) -> None:
    await stage.client.remove_engine(stage.engine.url)
    other = await another(stage)
    await stage.client.add_engine(other.url)
    _, llm = await opened(stage)
    assert await ask(llm)
    assert other.requests
    told = await row(stage, other)
    assert (told["state"], told["joined"], told["admitted"]) == ("healthy", True, True)


async def test_a_joining_engine_gets_no_call_until_the_trainer_admits_it(stage: Stage) -> None:
    await stage.client.admit_engine(stage.engine.url, True)
    other = await another(stage)
    told = await stage.client.add_engine(other.url + "/")
    assert (told["state"], told["joined"], told["healthy"]) == ("waiting", True, True)
    _, llm = await opened(stage)
    stage.engine.faults.append(Fault("hold"))
    under_way = asyncio.create_task(ask(llm))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    await stage.client.remove_engine(stage.engine.url)
    async with aiohttp.ClientSession() as http, http.get(stage.url + "/ready") as ready:
        assert ready.status == 503, "there is an engine, and it is well, but it does not serve"
    _, second = await opened(stage)
    waiting = asyncio.create_task(ask(second))
    await eventually(lambda: stage.gateway.pool.waiting == 1)
    assert not other.requests
    stage.engine.release()
    assert await under_way, "what was under way on the one that left went on"
    await stage.client.add_engine(other.url)
    assert not other.requests, "whoever adds it again admits nothing"
    await stage.client.admit_engine(other.url, True)
    assert await asyncio.wait_for(waiting, 10)
    assert len(other.requests) == 1
    await stage.client.admit_engine(other.url, False)
    assert (await row(stage, other))["state"] == "waiting"


async def test_an_engine_that_is_not_there_cannot_be_admitted(stage: Stage) -> None:
    with pytest.raises(GatewayError, match="there is no engine") as caught:
        await stage.client.admit_engine("http://127.0.0.1:9", True)
    assert caught.value.status == 404
    assert not stage.gateway.pool.trainer_managed


@pytest.mark.parametrize(("led", "version", "state"), [
    (True, "4", "waiting"), (True, "5", "healthy"), (False, "4", "healthy"),
])  # fmt: skip
async def test_an_engine_that_returns_with_other_weights_waits_for_the_trainer(
    stage: Stage, led: bool, version: str, state: str
) -> None:
    stage.engine.version = "5"
    if led:
        await stage.client.admit_engine(stage.engine.url, True)
    await until_version(stage, stage.engine)
    await stage.engine.stop()
    await eventually(lambda: stage.gateway.pool.engines()[0].quarantined)
    stage.engine.version = version
    await stage.engine.start()
    await eventually(lambda: stage.gateway.pool.engines()[0].healthy)
    assert (await row(stage, stage.engine))["state"] == state


async def test_an_engine_that_is_admitted_while_it_restarts_serves(stage: Stage) -> None:
    """Its owner started it with newer weights, and said so before a probe saw it."""
    await stage.client.admit_engine(stage.engine.url, True)
    await until_version(stage, stage.engine)
    await stage.engine.stop()
    await eventually(lambda: stage.gateway.pool.engines()[0].quarantined)
    stage.engine.version = "6"
    await stage.client.admit_engine(stage.engine.url, True)
    await stage.engine.start()
    await eventually(lambda: stage.gateway.pool.engines()[0].healthy)
    assert (await row(stage, stage.engine))["state"] == "healthy"


async def test_joined_and_waiting_engines_survive_a_restart_of_the_gateway(tmp_path: Path) -> None:
    options = GatewayOptions(model=make_model_dir(tmp_path / "tiny"), journal=tmp_path / "journal")
    first = Gateway(options)
    await first.start()
    await first.engines.add("http://127.0.0.1:5", admitted=True)
    await first.engines.add("http://127.0.0.1:6", ["http://127.0.0.1:7"])
    await first.close()
    later = Gateway(options)
    await later.start()
    assert [engine.record for engine in later.pool.engines()] == [
        ("http://127.0.0.1:5", ("http://127.0.0.1:5",), False, True, ""),
        ("http://127.0.0.1:6", ("http://127.0.0.1:7",), True, False, ""),
    ]
    assert not (await later.engines.add("http://127.0.0.1:8")).admitted
    await later.close()
