"""Weights sent in buckets: order, memory, and the effect of one engine's failure on the others."""

from __future__ import annotations

import asyncio
import functools
import runpy
import tempfile
import threading
import weakref
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import AsyncMock

import pytest
import torch

from tests import engine_wheels
from tests.waiting import eventually
from tidegate.errors import EngineError
from tidegate.trainer.publish import broadcast as sender
from tidegate.trainer.publish.broadcast import Link, WeightBroadcaster
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.weights.process_group import checksum

NUMBER = 6
SENT = checksum((f"layer {number}", torch.full((1,), float(number))) for number in range(NUMBER))


class Group:
    """A process group that takes everything at once."""

    name = "group"
    closed = False

    def broadcast(self, _: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


@dataclass
class Receiver:
    """An engine: it takes a bucket when `takes` is set; `breaks` at that bucket.

    It was proved to load every tensor, unless it is `staged`: then it replies with the right `checksum`.
    """

    url: str
    breaks: int | None = None
    staged: bool = False
    keeps_kv = False
    said: list[str] = field(default_factory=list)
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    got: int = 0
    checksum: int | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        self.said.append(path.strip("/"))
        if path == "/update_weights_from_distributed":
            assert size == 4
            if self.got == self.breaks:
                raise EngineError(f"{self.url} broke", retryable=True)
            await self.takes.wait()
            self.got += 1
            assert body is not None
            assert body["weight_version"] == "partial", "what comes is of no version before the end"
        if path == "/update_weight_version":
            assert body == {"new_version": "3", "abort_all_requests": False}
        return {"checksum": self.checksum} if path == "/end_weight_update" else {}

    async def pause(self) -> None:
        self.said.append("pause")

    async def resume(self) -> None:
        self.said.append("resume")

    async def try_resume(self) -> None:
        await self.resume()

    async def verify(self, version: int) -> None:
        self.said.append(f"verify {version}")


class Lagging(ThreadPoolExecutor):
    """Threads that, between giving a result and letting it go, wait for a core until an event."""

    def __init__(self, until: threading.Event) -> None:
        super().__init__(32)
        self._until = until

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        listened = threading.Event()

        def run() -> Any:
            listened.wait(10)  # else the listener would be called, and wait, in its own thread
            return work(*arguments, **named)

        future = super().submit(run)
        listen = future.add_done_callback

        def listen_and_lag(listener: Callable[[Future[Any]], object]) -> None:
            listen(listener)
            listen(lambda _: self._until.wait(10))
            listened.set()

        future.add_done_callback = listen_and_lag  # type: ignore[method-assign]
        return future


class Source:
    """Buckets of one float each; knows which were gathered."""

    def __init__(self) -> None:
        self.gathered = 0
        self.ended = threading.Event()
        self.thread: str | None = None

    def __call__(self, most_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        self.thread = threading.current_thread().name
        try:
            for number in range(NUMBER):
                self.gathered += 1
                yield {f"layer {number}": torch.full((1,), float(number))}
        finally:
            self.ended.set()


def sender_to(source: Source, notes: list[str], *engines: Receiver) -> WeightBroadcaster:
    made = WeightBroadcaster(source, notes.append, bucket_bytes=4)  # type: ignore[arg-type]
    made._links.update({one.url: Link(Group(), one.staged, proved=True) for one in engines})  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("staged", [False, True])
async def test_the_next_bucket_is_gathered_while_one_is_sent_and_no_more_are_held(
    staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, held = 0, weakref.WeakSet[torch.Tensor]()

    def concatenate(tensors: list[torch.Tensor], made: Any = torch.cat) -> torch.Tensor:
        nonlocal most
        held.add(data := made(tensors))
        most = max(most, len(held))
        return data

    monkeypatch.setattr(torch, "cat", concatenate)
    engine, source = Receiver("one", staged=staged, checksum=SENT), Source()
    asyncio.get_running_loop().set_default_executor(Lagging(source.ended))
    sending = asyncio.create_task(sender_to(source, [], engine).send([engine], 3))
    await eventually(lambda: source.gathered == 2 and engine.said.count("update_weights_from_distributed"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (engine.got, source.gathered) == (0, 2), "the first is on its way, the second is there, no third"
    assert source.thread != threading.current_thread().name
    engine.takes.set()
    assert await sending == {"one"}
    assert (engine.got, source.gathered, most, source.ended.is_set()) == (NUMBER, NUMBER, 2, True)
    updates = ["update_weights_from_distributed"] * NUMBER
    before = [] if staged else ["pause"]  # else what comes is live at once
    assert engine.said == [
        *before, "begin_weight_update", *updates, "pause", "end_weight_update",
        "update_weight_version", "verify 3", "resume",
    ]  # fmt: skip


@pytest.mark.parametrize("at", [0, 2, NUMBER - 1])
async def test_an_engine_that_fails_gets_no_more_and_stops_no_other(at: int) -> None:
    well, broken, source, notes = Receiver("well"), Receiver("broken", breaks=at), Source(), list[str]()
    for one in (well, broken):
        one.takes.set()
    sender = sender_to(source, notes, well, broken)
    assert await sender.send([well, broken], 3) == {"well"}
    assert (well.got, broken.got) == (NUMBER, at)
    assert broken.said[-2:] == ["end_weight_update", "destroy_weights_update_group"], "ready for another"
    assert "pause" in broken.said, "and stays paused: its weights are neither the old ones nor the new"
    assert "resume" not in broken.said
    assert notes == ["weights could not be sent and are loaded from files instead: broken broke"]
    assert sender._links.keys() == {"well"}


async def test_a_send_that_is_cancelled_leaves_engines_that_go_on() -> None:
    engine, source = Receiver("one"), Source()
    sender = sender_to(source, [], engine)
    sending = asyncio.create_task(sender.send([engine], 3))
    await eventually(lambda: "update_weights_from_distributed" in engine.said)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert engine.said[-1] == "resume"
    assert source.ended.is_set()
    assert not sender._links


async def test_a_source_that_fails_leaves_engines_that_go_on() -> None:
    engine = Receiver("one")
    engine.takes.set()

    def failing(_: int) -> Iterator[dict[str, torch.Tensor]]:
        yield {"a": torch.zeros(1)}
        raise RuntimeError("a rank is gone")

    sender = WeightBroadcaster(failing, print, 4)  # type: ignore[arg-type]
    sender._links["one"] = Link(Group(), staged=False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await sender.send([engine], 3)
    assert engine.said[-1] == "resume"


async def test_an_engine_that_stages_weights_and_gives_no_checksum_does_not_serve_them() -> None:
    engine, notes = Receiver("one", staged=True), list[str]()
    engine.takes.set()
    assert await sender_to(Source(), notes, engine).send([engine], 3) == set()
    assert "the checksum of the received weights is wrong" in notes[0]
    assert "verify 3" not in engine.said


@dataclass
class Skipping(Receiver):
    """An engine that overwrites its weights and skips names that it does not know, as SGLang does."""

    loads: Callable[[str], bool] = lambda name: True
    checks: bool = True
    loaded: dict[str, str] = field(default_factory=dict)
    label: int = 0

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        if path == "/update_weights_from_distributed":
            assert body is not None
            self.loaded |= {name: self.sent for name in body["names"] if self.loads(name)}
        return await super().call(path, body, size) if path != "/update_weight_version" else {}

    async def checksums(self, size: int) -> dict[str, str]:
        if not self.checks:
            raise EngineError("one gives no checksums")
        return dict(self.loaded)

    async def version(self) -> int:
        return self.label

    async def publish(self, sender: WeightBroadcaster, version: int) -> bool:
        """Send a version, and read its files unless the engine serves it then; returns whether it did."""
        self.sent = str(version)
        serves = await sender.send([self], version) == {self.url}  # type: ignore[list-item]
        self.loaded |= {f"layer {number}": self.sent for number in range(NUMBER)} if not serves else {}
        self.label = version
        return serves


def sender_to_a_stranger(engine: Receiver, notes: list[str]) -> WeightBroadcaster:
    made = sender_to(Source(), notes, engine)
    made._links[engine.url].proved = False
    engine.takes.set()
    return made


async def test_an_engine_serves_what_is_sent_once_it_was_compared_with_files() -> None:
    engine, notes = Skipping("one"), list[str]()
    sender = sender_to_a_stranger(engine, notes)
    assert [await engine.publish(sender, version) for version in (1, 2, 3)] == [False, True, True]
    assert not notes


async def test_an_engine_that_skips_a_tensor_serves_only_files() -> None:
    engine, notes = Skipping("one", loads=lambda name: name != "layer 4"), list[str]()
    sender = sender_to_a_stranger(engine, notes)
    assert [await engine.publish(sender, version) for version in (1, 2, 3)] == [False, False, False]
    assert len(notes) == 1, "it is not tried again"
    assert "1 tensors differ, such as layer 4" in notes[0]


async def test_an_engine_without_checksums_serves_only_files() -> None:
    engine, notes = Skipping("one", checks=False), list[str]()
    assert not await engine.publish(sender_to_a_stranger(engine, notes), 1)
    assert "gives no checksums" in notes[0]


@pytest.mark.parametrize("reply", [{}, {"ranks": []}, {"ranks": [{"checksums": {}}]}])
async def test_no_checksums_are_not_equal_checksums(reply: dict[str, Any]) -> None:
    engine: Any = SimpleNamespace(url="http://e", call=AsyncMock(return_value=reply))
    with pytest.raises(EngineError, match="http://e gives no checksums"):
        await EngineControl.checksums(engine, 1)


async def test_an_engine_with_another_version_than_the_one_compared_is_compared_again() -> None:
    engine, notes = Skipping("one"), list[str]()
    sender = sender_to_a_stranger(engine, notes)
    assert not await engine.publish(sender, 1)
    engine.label = 0  # as after a restart
    assert [await engine.publish(sender, version) for version in (2, 3)] == [False, True]
    assert not notes


class UpdateLock(Protocol):
    """Requests read, updates write; a writer that waits goes before new readers."""

    @property
    def reader_lock(self) -> AbstractAsyncContextManager[Any]: ...

    @property
    def writer_lock(self) -> AbstractAsyncContextManager[Any]: ...


class OwnLock:
    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._readers, self._waiting, self._writing = 0, 0, False

    @property
    @asynccontextmanager
    async def reader_lock(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._writing and not self._waiting)
            self._readers += 1
        yield
        async with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    @property
    @asynccontextmanager
    async def writer_lock(self) -> AsyncIterator[None]:
        async with self._changed:
            self._waiting += 1
            await self._changed.wait_for(lambda: not self._writing and not self._readers)
            self._waiting, self._writing = self._waiting - 1, True
        yield
        async with self._changed:
            self._writing = False
            self._changed.notify_all()


@functools.cache
def class_of_sglang() -> Callable[[], UpdateLock]:
    """The class in SGLang's wheel, of the version in the requirements."""
    (requirement,) = (one for one in engine_wheels.pinned() if one.startswith("sglang=="))
    with tempfile.TemporaryDirectory() as directory:
        with zipfile.ZipFile(engine_wheels.download(requirement, Path(directory))) as wheel:
            file = wheel.extract("sglang/srt/utils/aio_rwlock.py", directory)
        found: Callable[[], UpdateLock] = runpy.run_path(file)["RWLock"]
    return found


def lock_of_sglang() -> UpdateLock:
    return class_of_sglang()()


LOCKS = [OwnLock, pytest.param(lock_of_sglang, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]


@dataclass
class Locked(Receiver):
    """An engine with SGLang's rule: an update takes the writer's lock, unless the engine is paused."""

    lock: UpdateLock = field(default_factory=OwnLock)
    paused: bool = False

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        if self.paused or not path.endswith("_weight_update"):
            return await super().call(path, body, size)
        async with self.lock.writer_lock:
            return await super().call(path, body, size)

    async def pause(self) -> None:
        self.paused = True
        await super().pause()

    async def resume(self) -> None:
        self.paused = False
        await super().resume()

    async def generate(self, may_end: asyncio.Event) -> None:
        """Serve one request, which holds the reader's lock until its reply ends."""
        async with self.lock.reader_lock:
            await may_end.wait()


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("fails_at", [None, 0])
async def test_an_engine_with_running_requests_is_paused_before_its_update_begins(
    lock: Callable[[], UpdateLock], fails_at: int | None
) -> None:
    """Neither the update nor new requests wait for the running ones."""
    engine, may_end = Locked("busy", breaks=fails_at, lock=lock()), asyncio.Event()
    engine.takes.set()
    running = asyncio.create_task(engine.generate(may_end))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        sent = await sender_to(Source(), [], engine).send([engine], 3)
        assert sent == (set() if fails_at == 0 else {"busy"})
        may_end_at_once = asyncio.Event()
        may_end_at_once.set()
        await engine.generate(may_end_at_once)
    assert not running.done()
    may_end.set()
    await running


class Keeping(EngineControl):
    """An engine with SGLang's rules: updates take the writer's lock unless it is paused, and its cache cannot
    be flushed while requests that were paused in place use it."""

    staged = False

    def __init__(self, lock: UpdateLock, label: str) -> None:
        super().__init__("busy", None, keep_kv_of=2)  # type: ignore[arg-type]
        self.lock, self.label = lock, label
        self.modes: list[str] = []
        self.paused = False

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        body = body or {}
        if path == "/pause_generation":
            self.modes.append(body["mode"])
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif not self.paused and path.endswith("_weight_update"):
            async with self.lock.writer_lock:
                pass
        if body.get("flush_cache") and self.modes[-1] == "in_place":
            raise EngineError("the cache was not flushed because requests are still running")
        self.label = body.get("new_version") or body.get("weight_version") or self.label
        return {"weight_version": self.label}


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize(("label", "mode"), [("2", "in_place"), ("1", "retract"), ("default", "retract")])
async def test_requests_keep_their_cache_where_the_version_before_is_served(
    lock: Callable[[], UpdateLock], label: str, mode: str
) -> None:
    engine, notes = Keeping(lock(), label), list[str]()
    async with asyncio.timeout(5), engine.lock.reader_lock:  # a request that runs
        assert await sender_to(Source(), notes, engine).send([engine], 3) == {"busy"}, notes  # type: ignore[arg-type]
    assert engine.modes == [mode, mode]
    assert (engine.label, engine.paused) == ("3", False)


async def test_an_engine_that_cannot_be_paused_is_asked_for_no_end_of_an_update() -> None:
    """The call would wait for the running requests, and new requests would wait for it."""
    engine, may_end = Locked("busy"), asyncio.Event()

    async def refuse() -> None:
        raise EngineError("busy cannot be paused")

    engine.pause = refuse  # type: ignore[method-assign]
    running = asyncio.create_task(engine.generate(may_end))
    async with asyncio.timeout(5):
        assert await sender_to(Source(), [], engine).send([engine], 3) == set()
    assert engine.said == ["destroy_weights_update_group"]
    may_end.set()
    await running


@dataclass
class Unwilling(Receiver):
    """It says how it is set up, and joins no group."""

    setup: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        if path == "/server_info":
            return self.setup
        if path == "/init_weights_update_group":
            self.asked = body or {}
            raise EngineError("it will not")
        return {}


@pytest.mark.parametrize(
    ("policy", "engine", "backend"),
    [("cpu", "cpu", "gloo"), ("cpu", "cuda", "gloo"), ("cuda", "cpu", "gloo"), ("cuda", "cuda", "nccl")],
)
async def test_nccl_is_for_two_gpus(policy: str, engine: str, backend: str) -> None:
    """Which is asked for, and no more: that NCCL carries weights needs GPUs."""
    asked = Unwilling("http://127.0.0.1:1", setup={"device": engine, "tp_size": 4, "dp_size": 1})
    assert await WeightBroadcaster(Source(), print, device=policy).send([asked], 3) == set()  # type: ignore[arg-type]
    assert (asked.asked["backend"], asked.asked["world_size"], asked.asked["rank_offset"]) == (backend, 5, 1)


@pytest.mark.parametrize("name", ["dp_size", "pp_size"])
async def test_a_server_of_several_replicas_or_stages_is_refused_by_name(name: str) -> None:
    engine, notes = Unwilling("http://127.0.0.1:1", setup={"device": "cpu", name: 2}), list[str]()
    assert await WeightBroadcaster(Source(), notes.append).send([engine], 3) == set()  # type: ignore[arg-type]
    assert f"{name} = 2" in notes[0]
    assert not engine.asked


async def test_without_engines_left_nothing_more_is_gathered() -> None:
    broken, source = Receiver("broken", breaks=0), Source()
    assert await sender_to(source, [], broken).send([broken], 3) == set()
    assert source.gathered == 2, "the one that was asked for, and the one ahead"
    assert source.ended.is_set()


@pytest.mark.parametrize("url", ["http://no.such.host.invalid:1", "http://127.0.0.1:1"])
async def test_an_engine_without_a_process_group_is_noted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody knows, or a store that cannot be opened here: files are left."""

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("no port is free")

    monkeypatch.setattr(sender.dist, "TCPStore", full)
    engine, notes = Unwilling(url, setup={"device": "cpu"}), list[str]()
    assert await WeightBroadcaster(Source(), notes.append).send([engine], 3) == set()  # type: ignore[arg-type]
    assert f"engine {url}: cannot create a process group" in notes[0]


async def test_what_hangs_beside_an_engine_that_did_its_part_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "JOIN_S", 0.05)
    engine, release, stopped = Receiver("one"), threading.Event(), threading.Event()
    with pytest.raises(EngineError, match="TimeoutError"):
        await sender._run_with_engine(engine, engine.call("/begin_weight_update"), release.wait, stopped.set)
    assert stopped.is_set()
    release.set()
