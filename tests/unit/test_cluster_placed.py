"""Processes on other nodes as the run sees them, where the actor in between does not do as it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.trainer.cluster import placed
from tidegate.trainer.cluster.calls import LostError
from tidegate.trainer.cluster.passing import Node
from tidegate.trainer.cluster.placed import PlacedServer

HOME = Node("192.0.2.1")


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


def actor(**methods: Callable[..., Coroutine[Any, Any, Any]]) -> SimpleNamespace:
    """What has these methods, as Ray's handles have them."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


async def there(*_: object) -> tuple[Node, bool]:
    return Node("192.0.2.2"), False


@pytest.mark.parametrize("methods", [{"about": hang}, {"about": there, "start": hang}])
async def test_a_server_that_is_not_ready_in_time_is_named(
    methods: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "ANSWER_S", 0.01)
    server = PlacedServer("engine-2", actor(**methods), HOME, tmp_path, ready_s=0.02)
    async with asyncio.timeout(5):
        with pytest.raises(LostError, match=r"engine-2 did not answer within 0\.0"):
            await server.start()


async def test_a_lost_server_is_asked_for_until_it_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere, and with nothing in its logs that is known."""
    monkeypatch.setattr(placed, "PAUSE_S", 0)
    urls = iter(["http://192.0.2.2:1", LostError("it is being started"), "http://192.0.2.3:1"])

    async def start(_: object) -> str:
        found = next(urls)
        if isinstance(found, LostError):
            raise found
        return found

    async def died() -> tuple[str, str]:
        raise LostError("engine-2 was lost: its node died")

    server = PlacedServer("engine-2", actor(about=there, start=start, died=died), HOME, tmp_path)
    assert await server.start() == "http://192.0.2.2:1"
    server._known["engine-2.log"] = 5
    assert await server.died() == "the engine-2 was lost: its node died"
    await server.restart()
    assert (server.url, server.restarts, server._known) == ("http://192.0.2.3:1", 1, {})
