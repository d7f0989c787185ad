"""A run's own engines serve the run's gateway and trainer, and no other process of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from tests import REPO
from tests.http_app import served_app
from tidegate.config import Settings
from tidegate.gateway.engines.client import EngineClient
from tidegate.gateway.engines.engine import Affinity, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest
from tidegate.service.api_key import engine_key
from tidegate.service.service import Service
from tidegate.trainer.preflight import check_engines
from tidegate.trainer.processes import servers
from tidegate.trainer.processes.servers import LocalProcesses, teacher_server
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.trainer.teacher.client import ScoreClient

MODEL = REPO / "examples" / "tiny_base" / "model"
SETTINGS = Settings.model_validate(
    {"model": {"path": str(MODEL)}, "engine": {"max_slots": 2, "max_context": 256}}
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Service]:
    [engine] = LocalProcesses().engines(SETTINGS, tmp_path, lambda: (MODEL, 0))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def test_only_the_run_reaches_its_engines(server: Service) -> None:
    url = server.url
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer x"}):
            for path in ("update_weights_from_disk", "generate", "pause_generation", "update_weight_version"):
                async with http.post(f"{url}/{path}", json={"new_version": "7"}, headers=headers) as reply:
                    assert (reply.status, "TIDEGATE_ENGINE_KEY" in await reply.text()) == (401, True)
        async with http.get(f"{url}/health") as reply:
            assert reply.status == 200
        control = EngineControl(url, http)
        await control.check_sample()
        await control.load(MODEL, 3)
    await asyncio.to_thread(check_engines, [url])
    async with ScoreClient(30.0) as scores:
        assert len((await scores.score(url, [1, 2, 3], 0)).logprobs) == 2
    pool = EnginePool(PoolOptions(key=engine_key()))
    await pool.add(EngineRecord(url), wait_s=30.0)
    request = GenerateRequest(np.array([1, 2, 3], np.int32), {"temperature": 1.0, "ignore_eos": True}, 2)
    reply = await pool.sample(request, Affinity("f", "s"), asyncio.get_running_loop().time() + 30)
    await pool.close()
    assert len(reply.ids) == 2
    process = Path(f"/proc/{server.pid}")
    assert engine_key().encode() not in (process / "cmdline").read_bytes()


@pytest.mark.parametrize(
    ("gateway", "given", "needed"),
    [
        ({}, None, True),
        ({"url": "http://g:1"}, None, False),
        ({"url": "http://g:1"}, "given to both", True),
    ],
)
def test_engines_need_no_key_that_a_gateway_started_apart_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gateway: dict[str, str], given: str | None, needed: bool
) -> None:
    monkeypatch.setattr(servers, "given_engine_key", lambda: given)
    monkeypatch.setattr(servers, "engine_key", lambda: given or "random")
    settings = Settings.model_validate({**SETTINGS.model_dump(), "gateway": gateway})
    [engine] = LocalProcesses().engines(settings, tmp_path, lambda: (MODEL, 0))
    assert engine._secrets == ({"key": given or "random"} if needed else {})
    assert teacher_server(settings, "teacher", MODEL, tmp_path)._secrets == {"key": given or "random"}


async def test_a_login_in_an_engines_address_is_sent_in_place_of_the_key() -> None:
    seen: list[str] = []

    async def info(request: web.Request) -> web.Response:
        seen.extend(value.partition(" ")[0] for value in request.headers.getall("Authorization", []))
        return web.json_response({"weight_version": "0"})

    app, client = web.Application(), EngineClient(5.0, 5.0, "key")
    app.router.add_get("/model_info", info)
    async with served_app(app) as url, aiohttp.ClientSession() as http:
        for address in (url, url.replace("//", "//user:password@")):
            await EngineControl(address, http).version()
            await client.info(address)
    await client.close()
    assert seen == ["Bearer", "Bearer", "Basic", "Basic"]
