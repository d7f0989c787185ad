"""Servers for the client tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.clients.support import gateway_server
from tidegate.gateway.client import GatewayClient


@pytest.fixture(scope="session")
def gateway_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway_server(tmp_path_factory.mktemp("gateway")) as url:
        yield url


@pytest_asyncio.fixture
async def client(gateway_url: str) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(gateway_url) as made:
        yield made
