"""Sends weights to engines over process groups; embedded engines need no shared disk.

Each engine has its own group with the trainer, so that a failing engine does not affect the others and a
restarted one can rejoin alone. Weights are sent in buckets; the next bucket is gathered while one is sent, so
at most two are in memory. An engine that stages the new weights beside the current ones keeps generating and
is paused only for the switch. One that overwrites them in place, such as SGLang, is paused from the start,
and its weights are of no version until the end.

An engine must prove that it loaded every tensor: SGLang skips names that it does not know. One that stages
the weights replies with their checksum. One that overwrites them has checksums of its own tensors only: it
also reads the files of the first version that it receives, and its checksums after both must be equal.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.errors import EngineError
from tidegate.service.threads import in_daemon_thread
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.weights.checksum import MODULUS
from tidegate.weights.process_group import FLAT, HOST, JOIN_S, WeightsGroup, address_towards, checksum

BUCKET_BYTES, DEVICE_BUCKET_BYTES = 256 * 2**20, 2**30
"""Float32 bytes of a bucket, in host memory and in a GPU's, which sends a bucket in less time than its call
takes if it is small."""
PARTIAL = "partial"
"""Version label of an engine's weights during a transfer; the gateway refuses tokens with it."""

T = TypeVar("T")


class Trial(NamedTuple):
    """A version that an engine received and then reads from files: its checksums in between."""

    version: int
    checksums: dict[str, str]
    size: int


@dataclass(slots=True)
class Link:
    """The process group with an engine."""

    group: WeightsGroup
    staged: bool
    """Whether the engine keeps new weights beside the live ones and replies with their checksum."""
    proved: bool = False
    """Whether it was shown that an engine which overwrites its weights loads every tensor."""
    trial: Trial | None = None


class Bucket(NamedTuple):
    """Part of the weights, with the fields that describe it to an engine."""

    fields: dict[str, Any]
    data: Tensor
    """The tensors' bytes one after another: a mixture of experts has thousands of small tensors, each of
    which would be a collective operation of its own."""
    checksum: int

    @staticmethod
    def of(values: Mapping[str, Tensor]) -> Bucket:
        """Join tensors, whose memory is copied."""
        # Wide types first: each tensor then begins at a multiple of its type's width.
        named = sorted(values.items(), key=lambda item: -item[1].element_size())
        tensors = [tensor for _, tensor in named]
        fields = {
            "names": [name for name, _ in named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        flat = (tensor.detach().contiguous().reshape(-1) for tensor in tensors)  # bytes have no strides
        data = torch.cat([tensor.view(torch.uint8) for tensor in flat])
        return Bucket(fields, data, checksum(named))

    @property
    def size(self) -> int:
        """In bytes."""
        return self.data.numel()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, which share memory with `data`."""
        shapes = [torch.Size(shape) for shape in self.fields["shapes"]]
        dtypes = [getattr(torch, name) for name in self.fields["dtypes"]]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        parts = zip(torch.split(self.data, sizes), dtypes, shapes, strict=True)
        values = (part.view(dtype).reshape(shape) for part, dtype, shape in parts)
        return dict(zip(self.fields["names"], values, strict=True))


Source = Generator[dict[str, Tensor], None, None]
Keep = Callable[[Bucket], None]


class WeightBroadcaster:
    """Sends the policy's weights to engines.

    Args:
        source: yields the weights in buckets of at most the given number of bytes.
        note: prints a message about a failed transfer.
        bucket_bytes: size of a bucket.
        device: device of the policy. If it and the engine's are GPUs (which must differ), NCCL is used, else
            gloo.
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
        self._links: dict[str, Link] = {}
        """By the engine's URL."""
        self._opened: set[str] = set()
        """URLs of the engines on which an update may be open."""
        self._refused: set[str] = set()
        """URLs of the engines that did not load every tensor; they get files."""

    async def send(
        self, engines: Sequence[EngineControl], version: int, keep: Keep | None = None
    ) -> set[str]:
        """Load the weights on engines as this version; returns the URLs of those that serve it.

        `keep` is called in a thread with each bucket, with all of them if an engine serves the version.

        The policy must not be trained meanwhile. The slowest engine sets the pace, as all receive a bucket at
        the same time. The other engines may be paused, with weights of no version, and have to load files:
        those that failed, which leave their groups, and those that have to prove that they load every tensor.
        If this raises, all engines are resumed.
        """
        engines = [engine for engine in engines if engine.url not in self._refused]
        try:
            return await self._send(engines, version, keep)
        except BaseException:  # the caller will not have them load files
            await asyncio.gather(*(engine.try_resume() for engine in engines))
            raise

    async def _send(self, engines: Sequence[EngineControl], version: int, keep: Keep | None) -> set[str]:
        prefetcher = _Prefetcher(self._source(self._bucket_bytes), keep)
        done: list[EngineControl] = []
        try:
            bucket = await prefetcher.next()
            active = await self._on_all(engines, self._begin)
            size, total = 0, 0
            while bucket is not None and active:
                active = await self._on_all(active, partial(self._send_bucket, bucket=bucket))
                size, total = size + bucket.size, (total + bucket.checksum) % MODULUS
                bucket = None  # free it before a third bucket is gathered
                bucket = await prefetcher.next() if active else None
            done = await self._on_all(active, partial(self._end, size=size, total=total, version=version))
            links = {engine.url: self._links[engine.url] for engine in done}
            # The other engines still have to read the files, to prove that they load every tensor.
            return {url for url, link in links.items() if link.staged or link.proved}
        finally:
            await asyncio.gather(*(self._reset(engine) for engine in engines if engine not in done))
            await prefetcher.close()

    def retain(self, urls: Iterable[str]) -> None:
        """Close the groups of all other engines."""
        self._refused.intersection_update(urls := set(urls))
        for url in self._links.keys() - urls:
            self._close_link(url)

    def close(self) -> None:
        """Close all groups."""
        self.retain(())

    def _close_link(self, url: str) -> Link | None:
        link = self._links.pop(url, None)
        if link is not None:
            link.group.close()
        return link

    async def _on_all(
        self, engines: Sequence[EngineControl], step: Callable[[EngineControl], Awaitable[None]]
    ) -> list[EngineControl]:
        """Run a step on all engines at the same time; returns those on which it succeeded."""
        results = await asyncio.gather(*(self._try(engine, step) for engine in engines))
        return [engine for engine, succeeded in zip(engines, results, strict=True) if succeeded]

    async def _try(self, engine: EngineControl, step: Callable[[EngineControl], Awaitable[None]]) -> bool:
        try:
            await step(engine)
        except EngineError as error:
            self._note(f"weights could not be sent and are loaded from files instead: {error}")
            return False
        return True

    async def _begin(self, engine: EngineControl) -> None:
        if engine.url not in self._links:
            self._links[engine.url] = await self._join_group(engine)
        link = self._links[engine.url]
        if not link.staged:
            # As in SGLang, whose call below waits for all running requests to end if it is not paused, while
            # new requests wait for the call.
            await engine.pause()
            await self._compare(engine, link)
        # Before the call, as its reply may be lost after the engine has begun.
        self._opened.add(engine.url)
        await engine.call("/begin_weight_update", {})

    async def _send_bucket(self, engine: EngineControl, bucket: Bucket) -> None:
        group = self._links[engine.url].group
        body: dict[str, Any] = {
            **bucket.fields,
            "load_format": FLAT,
            "group_name": group.name,
            "flush_cache": not engine.keeps_kv,
            "abort_all_requests": False,
            "weight_version": PARTIAL,
        }
        call = engine.call("/update_weights_from_distributed", body, bucket.size)
        await _run_with_engine(engine, call, partial(group.broadcast, [bucket.data]), group.close)

    async def _end(self, engine: EngineControl, size: int, total: int, version: int) -> None:
        await engine.pause()
        reply = await engine.call("/end_weight_update", {}, size)
        self._opened.discard(engine.url)
        link = self._links[engine.url]
        if link.staged and reply.get("checksum") != total:
            raise EngineError(f"engine {engine.url}: the checksum of the received weights is wrong")
        if not link.staged and not link.proved:
            link.trial = Trial(version, await engine.checksums(size), size)
            return  # it stays paused until it has read the files
        label = {"new_version": str(version), "abort_all_requests": False}
        await engine.call("/update_weight_version", label)
        await engine.verify(version)
        await engine.resume()

    async def _compare(self, engine: EngineControl, link: Link) -> None:
        """Compare the engine's weights, read from files, with those of the same version that it received.

        Raises EngineError if they differ; the engine gets only files then.
        """
        trial, link.trial = link.trial, None
        if trial is None or await engine.version() != trial.version:
            return
        read = await engine.checksums(trial.size)
        if read == trial.checksums:
            link.proved = True
            return
        self._refused.add(engine.url)
        wrong = sorted(name for name, _ in read.items() ^ trial.checksums.items())
        raise EngineError(
            f"engine {engine.url} has other weights after version {trial.version} was sent to it than after "
            f"it read that version's files; {len(set(wrong))} tensors differ, such as {wrong[0]}. It reads "
            'files from now on; set trainer.publish_transport = "files"'
        )

    async def _reset(self, engine: EngineControl) -> None:
        """Prepare the engine for another update, over a new group."""
        link = self._close_link(engine.url)
        if engine.url in self._opened:
            self._opened.discard(engine.url)
            with suppress(EngineError):
                await engine.call("/end_weight_update", {})
        if link is not None:
            with suppress(EngineError):
                await engine.call("/destroy_weights_update_group", {"group_name": link.group.name})

    async def _join_group(self, engine: EngineControl) -> Link:
        """Create a group of the trainer and the engine's ranks. Raises EngineError."""
        info = await engine.call("/server_info")
        ranks, kind = _ranks_of(engine, info)
        device = self._device if kind == self._device.type else HOST
        name = f"tidegate-{secrets.token_hex(4)}"  # an engine may still have groups of an earlier run
        size, backend = 1 + ranks, "nccl" if device.type == "cuda" else "gloo"
        try:
            address, store = await asyncio.to_thread(_open_store, engine.url, size)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"engine {engine.url}: cannot create a process group: {error}") from error
        call = engine.call(
            "/init_weights_update_group",
            {
                "master_address": address, "master_port": store.port, "rank_offset": 1,
                "world_size": size, "group_name": name, "backend": backend,
            },
        )  # fmt: skip
        join = partial(WeightsGroup, store, 0, size, name, JOIN_S, address, device)
        return Link(await _run_with_engine(engine, call, join), bool(info.get("stages_weights")))


class _Prefetcher:
    """Gathers the next bucket of a source in a thread, in which it calls `keep` with it."""

    def __init__(self, source: Source, keep: Keep | None) -> None:
        self._source = source
        self._keep = keep
        self._ready: Bucket | None = None
        """The bucket that was gathered. A thread holds its own result until it has a core again."""
        self._next = self._start()

    async def next(self) -> Bucket | None:
        """Return the next bucket, or None at the end. Raises the source's errors."""
        # A cancelled caller must not cancel the task: its thread would go on, and a generator that runs
        # cannot be closed.
        await asyncio.shield(self._next)
        bucket, self._ready = self._ready, None
        if bucket is not None:
            self._next = self._start()
        return bucket

    async def close(self) -> None:
        """Close the source."""
        await asyncio.gather(self._next, return_exceptions=True)
        await asyncio.to_thread(self._source.close)

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.to_thread(self._gather))

    def _gather(self) -> None:
        values = next(self._source, None)
        if values is not None:
            self._ready = Bucket.of(values)
            if self._keep is not None:
                self._keep(self._ready)


async def _run_with_engine(
    engine: EngineControl,
    call: Coroutine[Any, Any, object],
    work: Callable[[], T],
    stop: Callable[[], None] = lambda: None,
) -> T:
    """Run blocking work in which the engine takes part through `call`; returns the work's result.

    Raises EngineError if either fails; `stop` then aborts the work.
    """
    # NCCL may wait without end for a lost member.
    working = asyncio.wrap_future(in_daemon_thread(work, "weights"))
    working.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited
    try:
        await call
    except EngineError:
        stop()
        raise
    try:
        async with asyncio.timeout(JOIN_S):  # the engine has finished its part
            return await working
    except (RuntimeError, TimeoutError) as error:
        stop()
        raise EngineError(f"engine {engine.url}: {type(error).__name__}: {error}", retryable=True) from error


def _ranks_of(engine: EngineControl, info: Mapping[str, Any]) -> tuple[int, str]:
    """Return the engine's number of ranks and kind of device. Raises EngineError."""
    for name in ("dp_size", "pp_size"):
        if info.get(name, 1) != 1:
            raise EngineError(
                f"engine {engine.url}: {name} = {info[name]}, but weights can be sent only to a server with "
                'one replica and one pipeline stage; set trainer.publish_transport = "files"'
            )
    return int(info.get("tp_size", 1)), str(info.get("device", "cpu"))


def _open_store(url: str, size: int) -> tuple[str, dist.TCPStore]:
    """Open a group's store at this machine's address as the engine sees it. Raises OSError, RuntimeError."""
    parts = urlsplit(url)
    address = address_towards(parts.hostname or "127.0.0.1", parts.port or 80)
    timeout = timedelta(seconds=JOIN_S)
    # The engine joins only when a later call names the store's port, so the store waits for no member here.
    return address, dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
