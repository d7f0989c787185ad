"""The event loops of asyncio and of uvloop, and a server in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.service.http1.calls import LOOPS
from tests.scripted_server import scripted


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


@pytest.fixture
def server_thread() -> Any:
    """A server in a thread of its own, whose event loop is not blocked."""
    ready, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def main() -> None:
        async with scripted() as server:
            urls.append(server.url)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait()
    yield urls[0]
    stop.set()
    thread.join()
