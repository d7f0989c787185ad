"""LoRA adapters that are published to vLLM without their base model (`trainer.lora.publish`)."""

from __future__ import annotations

import shutil
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
from tests.engine_contract import load
from tests.integration.engine.engine_http import Client
from tests.vllm.conftest import ARGUMENTS, vllm_server
from tidegate.config import EngineSettings

pytestmark = pytest.mark.timeout(1800)
OPTIONS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]


async def test_adapters_are_published_beside_those_in_use(python: str, tmp_path: Path) -> None:
    given = make_adapters(tmp_path)
    settings = EngineSettings(kind="vllm", python=Path(python), arguments=[*OPTIONS, *ARGUMENTS])
    stand = Published({"": given}, tmp_path, lambda now: vllm_server(settings, now, tmp_path))
    try:
        await publish_during_requests(stand)
        await cache_is_of_one_version(stand)
        await restarted_server_has_the_adapters(stand)
        async with aiohttp.ClientSession() as http:
            client, names = Client(stand.url, http), {"a": 0, "b": 1}
            for name, number in names.items():
                shutil.copytree(given.adapters[number], tmp_path / "several" / name)
            await load(client, tmp_path / "several", 4)
            shutil.rmtree(tmp_path / "several")  # vLLM reads an adapter once, and not in every step
            await rows_of_two_adapters(client, given, names)
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "lora_path": "c"}
            assert (await client.post("/generate", body))[0] == 400
            status, refusal = await client.post("/update_weights_from_disk", {"model_path": str(given.base)})
            assert status == 400
            assert "holds no LoRA adapter" in str(refusal)
    finally:
        await stand.stop()


async def test_adapters_of_two_policies_are_published_together(python: str, tmp_path: Path) -> None:
    await adapters_of_two_policies("vllm", python, ARGUMENTS, tmp_path)
