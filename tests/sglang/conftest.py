"""Real SGLang servers, from the environment that `make test-sglang` makes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_contract import embedded, make_versions, served
from tests.integration.engine.engine_http import Client
from tidegate.config import EngineSettings
from tidegate.service.service import Service
from tidegate.trainer.processes.servers import SGLangServer

PYTHON = os.environ.get("TIDEGATE_SGLANG_PYTHON", "")
ARGUMENTS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    "--max-total-tokens", "16384", "--disable-overlap-schedule",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of SGLang's environment."""
    if not PYTHON:
        pytest.skip("needs SGLang in an environment of its own: make test-sglang")
    return PYTHON


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_versions(tmp_path_factory)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "sglang"])
async def engine(
    request: pytest.FixtureRequest,
    python: str,
    versions: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Client]:
    """The same calls go to the embedded engine and to SGLang."""
    place = tmp_path_factory.mktemp(request.param)
    service: Service
    if request.param == "sglang":
        settings = EngineSettings(kind="sglang", python=Path(python), arguments=ARGUMENTS)
        service = SGLangServer(settings, lambda: (versions[0], 0), place, "engine", 0)
    else:
        service = embedded(versions[0], place)
    async with served(service) as client:
        yield client
