"""Real vLLM servers, from the environment that `make test-vllm` makes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_contract import embedded, make_versions, served
from tests.integration.engine.engine_http import Client
from tidegate.config import EngineSettings
from tidegate.service.service import LOOPBACK, Service
from tidegate.trainer.processes.provider import CurrentWeights
from tidegate.trainer.processes.servers import restart_s, vllm_arguments

PYTHON = os.environ.get("TIDEGATE_VLLM_PYTHON", "")
ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32",
    "--max-num-seqs", "128", "--gpu-memory-utilization", "0.2",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of vLLM's environment."""
    if not PYTHON:
        pytest.skip("needs vLLM in an environment of its own: make test-vllm")
    return PYTHON


def vllm_server(settings: EngineSettings, current: CurrentWeights, directory: Path) -> Service:
    """`tidegate vllm` with these weights."""

    def arguments() -> list[str]:
        return [*vllm_arguments(settings, current, 0), "--host", LOOPBACK]

    return Service("vllm", arguments, directory, name="engine", ready_s=restart_s(settings))


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_versions(tmp_path_factory, hidden=128)  # attention heads of 32: vLLM has none of 16


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "vllm"])
async def engine(
    request: pytest.FixtureRequest,
    python: str,
    versions: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Client]:
    """The same calls go to the embedded engine and to vLLM."""
    place = tmp_path_factory.mktemp(request.param)
    service: Service
    if request.param == "vllm":
        settings = EngineSettings(kind="vllm", python=Path(python), arguments=ARGUMENTS)
        service = vllm_server(settings, lambda: (versions[0], 0), place)
    else:
        service = embedded(versions[0], place)
    async with served(service) as client:
        yield client
