"""Weights sent to engines over process groups: neither a disk that both see, nor a file, is in the way.

Each engine has a group of its own with the trainer, so that one that dies takes no other with it, and one
that comes back joins by itself. Weights go in buckets: while one is sent to all engines, the next one is
gathered, so that two of them are held here. An engine that keeps what comes beside its live weights works on,
and is paused only to change over. One that doesn't, as SGLang, is paused from the beginning, and what it has
meanwhile is of no version.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.errors import EngineError
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.weights.checksum import MODULUS
from tidegate.weights.process_group import HOST, JOIN_S, WeightsGroup, address_towards, checksum

BUCKET_BYTES = 256 * 2**20
PARTIAL = "partial"
"""What an engine calls its weights while they come: the gateway takes no such token for one of a version."""

T = TypeVar("T")


class Bucket(NamedTuple):
    """Some of the weights, in host memory; `size` in bytes."""

    tensors: dict[str, Tensor]
    size: int
    checksum: int


Source = Generator[dict[str, Tensor], None, None]


class WeightBroadcaster:
    """Sends the policy's weights; `source(most_bytes)` gives them in buckets, gathered as they are asked for.

    `note` hears of what failed. `device` is what the policy is on: bytes go over NCCL where it and an engine
    are on GPUs, which have to be two, and over gloo elsewhere.
    """

    def __init__(
        self,
        source: Callable[[int], Source],
        note: Callable[[str], None],
        bucket_bytes: int = BUCKET_BYTES,
        device: str = "cpu",
    ) -> None:
        self._note = note
        self._source = source
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._groups: dict[str, WeightsGroup] = {}

    async def send(self, engines: Sequence[EngineControl], version: int) -> set[str]:
        """Make the weights live on engines, as this version; the URLs of those on which they are.

        The policy must not be trained meanwhile. All get the same bucket at the same time, so the slowest
        sets the pace. One that fails gets no more of them and is in a group no more; it may be paused, with
        weights of no version, and has to read files. Where this raises all engines go on.
        """
        try:
            return await self._send(engines, version)
        except BaseException:  # nobody will have them read files
            await asyncio.gather(*(_go_on(one) for one in engines))
            raise

    async def _send(self, engines: Sequence[EngineControl], version: int) -> set[str]:
        gathering = _Prefetcher(self._source(self._bucket_bytes))
        done: list[EngineControl] = []
        try:
            bucket = await gathering.next()
            going = await self._each(engines, self._begin)
            size, total = 0, 0
            while bucket is not None and going:
                going = await self._each(going, partial(self._bucket, bucket=bucket))
                size, total = size + bucket.size, (total + bucket.checksum) % MODULUS
                bucket = None  # before the next but one is gathered
                bucket = await gathering.next() if going else None
            done = await self._each(going, partial(self._end, size=size, total=total, version=version))
            return {engine.url for engine in done}
        finally:
            await asyncio.gather(*(self._give_up(one) for one in engines if one not in done))
            await gathering.close()

    def retain(self, urls: Iterable[str]) -> None:
        """Leave the groups with engines that are not among these."""
        for url in self._groups.keys() - set(urls):
            self._leave(url)

    def close(self) -> None:
        """Leave all groups."""
        self.retain(())

    def _leave(self, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            group.close()

    async def _each(
        self, engines: Sequence[EngineControl], step: Callable[[EngineControl], Awaitable[None]]
    ) -> list[EngineControl]:
        """A step with all of them at the same time; those with which it worked."""
        worked = await asyncio.gather(*(self._worked(engine, step) for engine in engines))
        return [engine for engine, well in zip(engines, worked, strict=True) if well]

    async def _worked(self, engine: EngineControl, step: Callable[[EngineControl], Awaitable[None]]) -> bool:
        try:
            await step(engine)
        except EngineError as error:
            self._note(f"weights could not be sent, and are read from files: {error}")
            return False
        return True

    async def _begin(self, engine: EngineControl) -> None:
        if engine.url not in self._groups:
            self._groups[engine.url] = await self._meet(engine)
        answer = await engine.call("/begin_weight_update", {})
        if not answer.get("staged"):  # what comes is live at once, as in SGLang
            await engine.pause()

    async def _bucket(self, engine: EngineControl, bucket: Bucket) -> None:
        group, tensors = self._groups[engine.url], list(bucket.tensors.values())
        body: dict[str, Any] = {
            "names": list(bucket.tensors),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors],
            "shapes": [list(one.shape) for one in tensors],
            "group_name": group.name,
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": PARTIAL,
        }
        ask = engine.call("/update_weights_from_distributed", body, bucket.size)
        await _both(engine, ask, partial(group.broadcast, tensors), group.close)

    async def _end(self, engine: EngineControl, size: int, total: int, version: int) -> None:
        await engine.pause()  # again, where it had to be before
        answer = await engine.call("/end_weight_update", {}, size)
        came = answer.get("checksum", total)  # SGLang gives none
        if came != total:
            raise EngineError(f"engine {engine.url}: the weights that came are not those that were sent")
        label = {"new_version": str(version), "abort_all_requests": False}
        await engine.call("/update_weight_version", label)
        await engine.verify(version)
        await engine.resume()

    async def _give_up(self, engine: EngineControl) -> None:
        """Make it ready for another update, over a group of another name."""
        group = self._groups.get(engine.url)
        self._leave(engine.url)
        with suppress(EngineError):
            await engine.call("/end_weight_update", {})
        if group is not None:
            with suppress(EngineError):
                await engine.call("/destroy_weights_update_group", {"group_name": group.name})

    async def _meet(self, engine: EngineControl) -> WeightsGroup:
        """A group of the trainer and the engine's ranks. Raises EngineError."""
        ranks, kind = await _ranks_of(engine)
        device = self._device if kind == self._device.type else HOST
        name = f"tidegate-{secrets.token_hex(4)}"  # an engine may still have those of an earlier run
        size, backend = 1 + ranks, "nccl" if device.type == "cuda" else "gloo"
        try:
            address, store = await asyncio.to_thread(_meeting_place, engine.url, size)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"engine {engine.url}: no group can be made with it: {error}") from error
        ask = engine.call(
            "/init_weights_update_group",
            {
                "master_address": address, "master_port": store.port, "rank_offset": 1,
                "world_size": size, "group_name": name, "backend": backend,
            },
        )  # fmt: skip
        return await _both(engine, ask, partial(WeightsGroup, store, 0, size, name, JOIN_S, address, device))


class _Prefetcher:
    """The buckets of a source, of which the next one is gathered in a thread meanwhile."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ahead = self._start()

    async def next(self) -> Bucket | None:
        """None where there is none left. Raises what the source raises."""
        bucket = await asyncio.shield(self._ahead)
        if bucket is not None:
            self._ahead = self._start()
        return bucket

    async def close(self) -> None:
        """Let the source come to its end."""
        await asyncio.gather(self._ahead, return_exceptions=True)
        await asyncio.to_thread(self._source.close)

    def _start(self) -> asyncio.Task[Bucket | None]:
        return asyncio.create_task(asyncio.to_thread(self._gather))

    def _gather(self) -> Bucket | None:
        tensors = next(self._source, None)
        if tensors is None:
            return None
        size = sum(one.numel() * one.element_size() for one in tensors.values())
        return Bucket(tensors, size, checksum(tensors.items()))


async def _both(
    engine: EngineControl,
    ask: Coroutine[Any, Any, object],
    work: Callable[[], T],
    stop: Callable[[], None] = lambda: None,
) -> T:
    """Do a blocking piece of work that the engine takes part in when it is asked to; its result.

    Raises EngineError where either fails; `stop` ends work that nobody will take part in.
    """
    working = _aside(work)
    working.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be left alone
    try:
        await ask
    except EngineError:
        stop()
        raise
    try:
        async with asyncio.timeout(JOIN_S):  # the engine has done its part
            return await working
    except (RuntimeError, TimeoutError) as error:
        stop()
        raise EngineError(f"engine {engine.url}: {type(error).__name__}: {error}", retryable=True) from error


def _aside(work: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread that does not keep the process from ending: NCCL may wait for ever for who is gone."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            done.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(done)


async def _ranks_of(engine: EngineControl) -> tuple[int, str]:
    """How many ranks hold the engine's weights, and on what kind of device. Raises EngineError."""
    said = await engine.call("/server_info")
    for name in ("dp_size", "pp_size"):
        if said.get(name, 1) != 1:
            raise EngineError(
                f"engine {engine.url}: {name} = {said[name]}: weights can be sent to a server of one replica "
                'in one stage; set trainer.publish_transport = "files"'
            )
    return int(said.get("tp_size", 1)), str(said.get("device", "cpu"))


def _meeting_place(url: str, size: int) -> tuple[str, dist.TCPStore]:
    """Where a group of that size meets: this machine's address as the engine sees it, and the store there.
    Raises OSError, RuntimeError."""
    parts = urlsplit(url)
    address = address_towards(parts.hostname or "127.0.0.1", parts.port or 80)
    timeout = timedelta(seconds=JOIN_S)
    return address, dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)


async def _go_on(engine: EngineControl) -> None:
    with suppress(EngineError):
        await engine.resume()
