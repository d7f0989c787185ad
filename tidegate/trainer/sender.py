"""Weights sent to engines over process groups: neither a disk that both see, nor a file, is in the way.

Each engine has a group of its own with the trainer, so that one that dies takes no other with it, and one
that comes back joins by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from tidegate.errors import EngineError
from tidegate.weights_group import BACKENDS, WeightsGroup, buckets, checksum

BUCKET_BYTES = 256 * 2**20
TIMEOUT_S = 60.0
"""How long an engine may take to join a group, or to take a bucket."""

T = TypeVar("T")


class Called(Protocol):
    """An engine's control calls: `trainer.publish.EngineControl`."""

    url: str

    async def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]: ...


class Sender:
    """Sends what it last took. `weights()` gives the live parameters by name; `note` hears of what failed."""

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor]],
        note: Callable[[str], None],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.note = note
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._groups: dict[str, WeightsGroup] = {}
        self._numbers = itertools.count(1)
        self._taken: dict[str, Tensor] = {}
        self._checksum = 0

    def take(self) -> None:
        """Gather the weights. It blocks; the policy must not be trained until `drop`."""
        self._taken = {name: one.detach().cpu().contiguous() for name, one in self._weights().items()}
        self._checksum = checksum(self._taken.items())

    def drop(self) -> None:
        """Let go of what was taken."""
        self._taken = {}

    @property
    def ready(self) -> bool:
        """Whether something is taken."""
        return bool(self._taken)

    async def send(self, engine: Called, version: int) -> None:
        """Make what was taken live on a paused engine, bucket by bucket.

        Raises EngineError; the group is closed then, and the next time another one is made.
        """
        try:
            group = self._groups.get(engine.url) or await self._meet(engine)
            try:
                await engine.call("/begin_weight_update", {})
                await self._buckets(engine, group, version)
            except EngineError:
                with suppress(EngineError):  # so that the next update can be opened
                    await engine.call("/end_weight_update", {})
                raise
            answer = await engine.call("/end_weight_update", {})
            came = answer.get("checksum", self._checksum)  # SGLang gives none
            if came != self._checksum:
                raise EngineError(f"engine {engine.url}: the weights that came are not those that were sent")
        except BaseException:
            self._leave(engine.url)
            raise

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

    async def _meet(self, engine: Called) -> WeightsGroup:
        """A group of the two. Raises EngineError."""
        name = f"tidegate-{next(self._numbers)}"
        timeout = timedelta(seconds=TIMEOUT_S)
        address = await asyncio.to_thread(_address_towards, engine.url)
        store = dist.TCPStore(address, 0, 2, is_master=True, wait_for_workers=False, timeout=timeout)
        ask = engine.call(
            "/init_weights_update_group",
            {
                "master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": 2,
                "group_name": name, "backend": BACKENDS[-1],
            },
        )  # fmt: skip
        group = await _both(engine, ask, partial(WeightsGroup, store, 0, 2, name, TIMEOUT_S))
        self._groups[engine.url] = group
        return group

    async def _buckets(self, engine: Called, group: WeightsGroup, version: int) -> None:
        """One after the other; the last one says what version they are."""
        *others, last = buckets(self._taken, self._bucket_bytes)
        for names in others:
            await self._bucket(engine, group, names, None)
        await self._bucket(engine, group, last, version)

    async def _bucket(
        self, engine: Called, group: WeightsGroup, names: list[str], version: int | None
    ) -> None:
        tensors = [self._taken[name] for name in names]
        body: dict[str, Any] = {
            "names": names,
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors],
            "shapes": [list(one.shape) for one in tensors],
            "group_name": group.name,
            "flush_cache": version is not None,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        ask = engine.call("/update_weights_from_distributed", body)
        await _both(engine, ask, partial(group.broadcast, tensors), group.close)


async def _both(
    engine: Called,
    ask: Coroutine[Any, Any, object],
    work: Callable[[], T],
    stop: Callable[[], None] = lambda: None,
) -> T:
    """Do a blocking piece of work that the engine takes part in when it is asked to; its result.

    Raises EngineError where either fails; `stop` ends work that nobody will take part in.
    """
    working = asyncio.create_task(asyncio.to_thread(work))
    working.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may be left alone
    try:
        await ask
    except EngineError:
        stop()
        raise
    try:
        return await working
    except RuntimeError as error:
        raise EngineError(f"engine {engine.url}: {type(error).__name__}: {error}", retryable=True) from error


def _address_towards(url: str) -> str:
    """This machine's address as a server elsewhere sees it; nothing is sent to find out."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        address: str = probe.getsockname()[0]
    return address
