"""The process group over which a trainer sends weights to an engine; either end may be SGLang's."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.weights.checksum import MODULUS, Bytes, of_tensor

DEVICES = {"gloo": "cpu", "cpu:gloo": "cpu", "nccl": "cuda"}
"""SGLang's names for what carries the bytes, and the kind of device between whose memories it does."""
HOST = torch.device("cpu")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where it is set, it says where gloo listens."""
_MAKING = threading.Lock()
"""One group over NCCL at a time, as a variable of the environment changes for it."""
JOIN_S = 60.0
"""How long a member may take to join a group, for both ends."""
SLOWEST_BYTES_S = 50e6
"""Weights that come more slowly are given up: a fast network or disk is ten times as fast and more."""


class WeightsGroup:
    """A trainer, rank 0, and an engine, which may be of several ranks.

    By NCCL bytes go from GPU to GPU, by gloo from host to host; what is sent and what comes is in host memory
    either way. It is none of torch's global groups: a process may be in many of them, each with its name, and
    they may come and go one by one. The keys under which members meet are those of SGLang's custom groups.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        address: str,
        device: torch.device = HOST,
    ) -> None:
        """Over NCCL where the device is a GPU, else over gloo, which listens at `address`, this machine's as
        the other members see it. Returns when all members are there, over NCCL at once. Raises RuntimeError
        where they are not within `timeout_s`, or there is no NCCL here."""
        places = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        place = dist.PrefixStore(f"{device.type}/", places)
        self.name = name
        self._store = store  # the members' connections live as long as it does
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if device.type == "cuda":
            self._group = _nccl(place, rank, size, timeout)
        else:
            self._group = _gloo(place, rank, size, timeout, address)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values in all members' tensors, in their order. Raises RuntimeError, also where they do
        not come in the time that so many bytes may take."""
        if self._group is None:
            raise RuntimeError(f"the group {self.name!r} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        size = sum(one.numel() * one.element_size() for one in tensors)
        options.timeout = timedelta(seconds=self._timeout_s + transfer_s(size))
        if self._device.type == "cuda":
            self._broadcast_by_gpu(tensors, options)
            return
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def _broadcast_by_gpu(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> None:
        """On a stream of its own, as an engine decodes meanwhile."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            there = [
                torch.empty_like(tensor, device=self._device) if self._rank else tensor.to(self._device)
                for tensor in tensors
            ]
            for work in [self._group.broadcast([tensor], options) for tensor in there]:
                work.wait(options.timeout)
            if self._rank:
                for tensor, came in zip(tensors, there, strict=True):
                    tensor.copy_(came)
            stream.synchronize()

    def close(self) -> None:
        """Let go of the connections, which ends them: what other members wait for fails.

        NCCL's end may take a minute, which nobody waits for.
        """
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            threading.Thread(target=group.abort, name=f"end of {self.name}", daemon=True).start()


def address_towards(host: str, port: int) -> str:
    """This machine's address as a server elsewhere sees it; nothing is sent to find out. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        address: str = probe.getsockname()[0]
    return address


def _gloo(place: dist.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """By itself gloo listens where the machine's name points, which often is 127.0.0.1."""
    if GLOO_INTERFACE in os.environ:
        return dist.ProcessGroupGloo(place, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(place, rank, size, options)


def _nccl(place: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    with (
        _MAKING,
        _variable("TORCH_NCCL_BLOCKING_WAIT", "1"),
    ):  # else torch ends the process where a member is gone
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(place, rank, size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, for as long as something is made that reads it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def transfer_s(size: int) -> float:
    """How long so many bytes of weights may take, beside what any call takes."""
    return size / SLOWEST_BYTES_S


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Of names and bytes in host memory, as `tidegate.weights.checksum` has it."""
    return sum(of_tensor(name, _bytes(tensor)) for name, tensor in tensors) % MODULUS


def _bytes(tensor: Tensor) -> Bytes:
    found: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def buckets(
    tensors: Mapping[str, Tensor], most_bytes: int, unit: Callable[[str], str] = str
) -> list[list[str]]:
    """The names in runs of at most `most_bytes`, in the order of their units, which stay whole.

    A unit that is larger by itself goes alone; unless said otherwise a tensor is one.
    """
    units: dict[str, list[str]] = {}
    for name in tensors:
        units.setdefault(unit(name), []).append(name)
    found: list[list[str]] = []
    held = 0
    for names in units.values():
        size = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
        if not found or held + size > most_bytes:
            found.append([])
            held = 0
        found[-1] += names
        held += size
    return found
