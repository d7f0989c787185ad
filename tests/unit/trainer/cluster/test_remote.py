"""Processes on other nodes, when the actor between them and the run fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tidegate.trainer.cluster import remote as placed
from tidegate.trainer.cluster.actors import LostError
from tidegate.trainer.cluster.environment import ClusterNode
from tidegate.trainer.cluster.file_transfer import FileBundle, FileCache
from tidegate.trainer.cluster.remote import RemoteServer

HOME = ClusterNode("192.0.2.1")


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


def actor(**methods: Callable[..., Coroutine[Any, Any, Any]]) -> SimpleNamespace:
    """What has these methods, as Ray's handles have them."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


async def there(*_: object) -> tuple[ClusterNode, bool]:
    return ClusterNode("192.0.2.2"), False


@pytest.mark.parametrize("methods", [{"about": hang}, {"about": there, "start": hang}])
async def test_a_server_that_is_not_ready_in_time_is_named(
    methods: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "REPLY_TIMEOUT_S", 0.01)
    server = RemoteServer("engine-2", actor(**methods), HOME, tmp_path, ready_s=0.02)
    async with asyncio.timeout(5):
        with pytest.raises(LostError, match=r"engine-2 did not respond within 0\.0"):
            await server.start()


async def test_a_lost_server_is_asked_for_until_it_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "PAUSE_S", 0)
    urls = iter(["http://192.0.2.2:1", LostError("it is being started"), "http://192.0.2.3:1"])

    async def start(*_: object) -> str:
        found = next(urls)
        if isinstance(found, LostError):
            raise found
        return found

    async def wait_for_exit() -> tuple[str, str]:
        raise LostError("engine-2 was lost: its node died")

    server = RemoteServer(
        "engine-2", actor(about=there, start=start, wait_for_exit=wait_for_exit), HOME, tmp_path
    )
    assert await server.start() == "http://192.0.2.2:1"
    assert await server.wait_for_exit() == "the engine-2 was lost: its node died"
    await server.restart()
    assert (server.url, server.restarts) == ("http://192.0.2.3:1", 1)


class Logging:
    """An actor's logs; the actor answers when it is let."""

    def __init__(self, directory: str) -> None:
        self.file = Path(directory) / "engine-2.log"
        self.text = b""
        self.go = asyncio.Event()
        self.go.set()

    async def logs(self, known: Mapping[Path, int]) -> dict[Path, bytes]:
        found = {self.file: self.text[known.get(self.file, 0) :]}
        await self.go.wait()
        return found


async def test_logs_that_are_asked_for_twice_at_a_time_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a run's end the last logs are taken while those of the last seconds are under way."""

    async def nothing() -> None: ...

    monkeypatch.setattr(placed.ray, "kill", lambda _: None)
    node = Logging("/tmp/first")
    server = RemoteServer("engine-2", actor(logs=node.logs, stop=nothing, clean_up=nothing), HOME, tmp_path)
    node.text = b"one\n"
    node.go.clear()
    both = [asyncio.create_task(server.gather_logs()), asyncio.create_task(server.stop())]
    for _ in range(10):
        await asyncio.sleep(0)
    node.go.set()
    await asyncio.gather(*both)
    assert (tmp_path / "engine-2.log").read_bytes() == b"one\n"


async def test_logs_of_an_actor_that_was_taken_for_lost_are_not_fetched_again(tmp_path: Path) -> None:
    """Those of one that was made again, elsewhere, are, from their beginning."""
    node = Logging("/tmp/first")
    host = actor(logs=lambda known: node.logs(known), about=there)
    server = RemoteServer("engine-2", host, HOME, tmp_path)
    node.text = b"one\n"
    await server.gather_logs()
    await server.restart_after_loss(lambda: server.connect(1))
    node.text += b"two\n"
    await server.gather_logs()
    node = Logging("/tmp/second")
    node.text = b"made again\n"
    await server.gather_logs()
    assert (tmp_path / "engine-2.log").read_bytes() == b"one\ntwo\nmade again\n"


class Reference:
    """Of bytes in the object store, which come when they are let."""

    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content, np.uint8)
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.uint8]]:
        self.asked.set()
        yield from self.go.wait().__await__()
        return self._content


async def test_a_directory_requested_twice_at_once_is_unpacked_once(tmp_path: Path) -> None:
    """An engine that is started again and a publish want the same version."""
    first, second = Reference(b"aa"), Reference(b"bb")
    shelf = FileCache(tmp_path)
    parcel = FileBundle("000001-v1", {"a": first, "b": second})
    both = [asyncio.create_task(shelf.unpack(parcel)) for _ in range(2)]
    first.go.set()
    async with asyncio.timeout(5):
        await second.asked.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        second.go.set()
        places = await asyncio.gather(*both)
    assert places == [tmp_path / parcel.name] * 2
    assert {file.name: file.read_bytes() for file in places[0].iterdir()} == {"a": b"aa", "b": b"bb"}
    assert await shelf.unpack(parcel) == places[0]
