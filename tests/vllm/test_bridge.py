"""Behaviour that only vLLM's adapter has: its own refusals, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.runs import gone
from tests.integration.engine.engine_http import Client
from tests.vllm.conftest import ARGUMENTS, vllm_server
from tidegate.config import EngineSettings
from tidegate.errors import StartError

pytestmark = pytest.mark.timeout(600)


def children(pid: int) -> list[int]:
    """The processes that it started, and theirs."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    direct = [int(one) for one in found.split()]
    return [*direct, *(one for child in direct for one in children(child))]


async def test_it_refuses_what_vllm_has_not_and_ends_whole(
    python: str, versions: list[Path], tmp_path: Path
) -> None:
    settings = EngineSettings(kind="vllm", python=Path(python), arguments=ARGUMENTS)
    service = vllm_server(settings, lambda: (versions[0], 0), tmp_path)
    try:
        url = await service.start()
        async with aiohttp.ClientSession() as http:
            await refusals(Client(url, http))
        assert service.pid is not None
        family = children(service.pid)
        assert family
        os.kill(family[0], signal.SIGKILL)  # vLLM's server: the one before it cannot go on
        assert "ended with exit code" in await service.wait_for_exit()
        assert "the vLLM server was killed by SIGKILL" in service.last_log_line()
        assert all(gone(one) for one in family)
        await service.restart()
        family = children(service.pid)
        os.kill(service.pid, signal.SIGKILL)
        await service.wait_for_exit()
        assert all(gone(one) for one in family), "vLLM ends with the one that owns it"
    finally:
        await service.stop()


async def refusals(engine: Client) -> None:
    for path, body, said in (
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"repetition_penalty": 1.1}},
            "repetition_penalty",
        ),
        ("/pause_generation", {"mode": "in_place"}, "in_place"),
        ("/update_weights_from_disk", {"model_path": "/x", "flush_cache": False}, "flush_cache"),
        ("/abort_request", {"rid": ""}, "rid"),
    ):
        status, answer = await engine.post(path, body)
        assert status == 400
        assert said in answer["error"]["message"]


async def test_a_server_that_cannot_start_says_why(python: str, versions: list[Path], tmp_path: Path) -> None:
    settings = EngineSettings(kind="vllm", python=Path(python), arguments=["--no-such-argument"])
    service = vllm_server(settings, lambda: (versions[0], 0), tmp_path)
    with pytest.raises(StartError, match="the vLLM server did not start"):
        await service.start()
    assert "--no-such-argument" in service.log.read_text()
