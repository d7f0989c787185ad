"""LoRA adapters that are published to SGLang without their base model (`trainer.lora.publish`)."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.engine_adapters import (
    Published,
    adapters_of_two_policies,
    cache_is_of_one_version,
    make_adapters,
    publish_during_requests,
    restarted_server_has_the_adapters,
    rows_of_two_adapters,
)
from tests.integration.engine.engine_http import Client
from tests.sglang.conftest import ARGUMENTS
from tidegate.config import EngineSettings
from tidegate.trainer.processes.servers import SGLangServer

pytestmark = pytest.mark.timeout(1800)
LORA = [*ARGUMENTS, "--lora-backend", "torch_native"]
OPTIONS = ["--enable-lora", "--max-loras-per-batch", "3"]


async def test_adapters_are_published_beside_those_in_use(python: str, tmp_path: Path) -> None:
    given = make_adapters(tmp_path)
    settings = EngineSettings(kind="sglang", python=Path(python), arguments=LORA)
    stand = Published(
        {"": given}, tmp_path, lambda now: SGLangServer(settings, now, tmp_path, "engine", 0, options=OPTIONS)
    )
    try:
        await publish_during_requests(stand)
        assert stand.endpoint.adapter == "v2"
        await cache_is_of_one_version(stand)
        async with aiohttp.ClientSession() as http:
            client = Client(stand.url, http)
            _, models = await client.get("/v1/models")
            assert [one["id"] for one in models["data"][1:]] == ["v3"], "no request uses the earlier ones"
            await client.post(
                "/load_lora_adapter", {"lora_name": "other", "lora_path": str(given.adapters[1])}
            )
            await rows_of_two_adapters(client, given, {"v3": 0, "other": 1})
        await restarted_server_has_the_adapters(stand)
    finally:
        await stand.stop()


async def test_adapters_of_two_policies_are_published_together(python: str, tmp_path: Path) -> None:
    assert await adapters_of_two_policies("sglang", python, LORA, tmp_path) == ["v2-a", "v2-b"]
