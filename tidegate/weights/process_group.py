"""Process group over which a trainer sends weights to an engine, compatible with SGLang's."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.weights.checksum import MODULUS, WORD, Bytes, of_tensor, of_words
from tidegate.weights.files import transfer_s

DEVICES = {"gloo": "cpu", "cpu:gloo": "cpu", "nccl": "cuda"}
"""SGLang's names of backends, and the kind of device whose memory they transfer."""
HOST = torch.device("cpu")
FLAT = "flattened_bucket"
"""SGLang's name for tensors that are sent as one tensor of their bytes."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with gloo's network interface, which takes precedence if it is set."""
_NCCL_LOCK = threading.Lock()
"""Held while an NCCL group is created, which changes an environment variable."""
JOIN_S = 60.0
"""Timeout of joining a group, on both ends."""


class WeightsGroup:
    """Process group of a trainer (rank 0) and the ranks of one engine.

    NCCL transfers between GPUs, gloo between hosts; tensors are in host memory on both ends either way. It is
    not one of torch's global groups: a process may join and leave several, by name. Its store keys are those
    of SGLang's custom groups.
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
        """Join the group as `rank` of `size`; with gloo, wait until all members have joined.

        Gloo listens on `address`, which is this machine's as the other members see it. A GPU as `device`
        selects NCCL. Raises RuntimeError if members do not join in time, or NCCL is not available.
        """
        keys = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        keys = dist.PrefixStore(f"{device.type}/", keys)
        self.name = name
        self._store = store  # connections end when it is freed
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        join = _nccl if device.type == "cuda" else partial(_gloo, address)
        self._group: Any = join(keys, rank, size, timeout)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's tensors to all members. Raises RuntimeError, also if the transfer is too slow."""
        if self._group is None:
            raise RuntimeError(f"the group {self.name!r} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        options.timeout = timedelta(seconds=self._timeout_s + transfer_s(size))
        if self._device.type == "cuda":
            self._broadcast_by_gpu(tensors, options)
            return
        for work in [self._group.broadcast([tensor.cpu()], options) for tensor in tensors]:
            work.wait()

    def _broadcast_by_gpu(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> None:
        """Broadcast on a separate stream, as an engine may be decoding.

        Tensors in the GPU's memory are sent from there.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))  # which may be computing the tensors
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            on_gpu = [
                torch.empty_like(tensor, device=self._device) if self._rank else tensor.to(self._device)
                for tensor in tensors
            ]
            for work in [self._group.broadcast([tensor], options) for tensor in on_gpu]:
                work.wait(options.timeout)
            if self._rank:
                for tensor, value in zip(tensors, on_gpu, strict=True):
                    tensor.copy_(value, non_blocking=tensor.is_pinned())
            stream.synchronize()

    def close(self) -> None:
        """Close the connections, on which pending operations of other members fail.

        NCCL is aborted in a thread, as that may take a minute.
        """
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            threading.Thread(target=group.abort, name=f"end of {self.name}", daemon=True).start()


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`, without sending anything. Raises OSError."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def _gloo(address: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a gloo group that listens on `address`; gloo's default, the host name's, often is 127.0.0.1."""
    if GLOO_INTERFACE in os.environ:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("this build of torch has no NCCL")
    with (
        _NCCL_LOCK,
        _environment_variable("TORCH_NCCL_BLOCKING_WAIT", "1"),
    ):  # else torch aborts the process when a member is lost
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return the checksum of tensors, as defined in `tidegate.weights.checksum`.

    Words of tensors on a device are summed there, and only the sums are copied to the host.
    """
    total = 0
    names: list[str] = []
    sums: list[Tensor] = []
    for name, tensor in tensors:
        if tensor.device.type == "cpu":
            total += of_tensor(name, bytes_of(tensor))
        else:
            names.append(name)
            sums.append(sums_of_words(tensor))
    words = map(sum, torch.stack(sums).tolist()) if sums else ()
    return (total + sum(map(of_words, names, words))) % MODULUS


def sums_of_words(tensor: Tensor) -> Tensor:
    """Return, on the tensor's device, the sum of its 64-bit words, which wraps, and the rest of its bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD:
        data = data.clone()
    whole, rest = data.tensor_split([data.numel() - data.numel() % WORD])
    padded = torch.nn.functional.pad(rest, (0, WORD - rest.numel()))
    return torch.stack([whole.view(torch.int64).sum(), padded.view(torch.int64).sum()])


def bytes_of(tensor: Tensor) -> Bytes:
    """Return a tensor's values as bytes, which share its memory if it is contiguous and in host memory."""
    data: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def buckets(
    tensors: Mapping[str, Tensor], max_bytes: int, unit: Callable[[str], str] = str
) -> list[list[str]]:
    """Split the names into buckets of at most `max_bytes`, keeping units (by default tensors) together.

    A larger unit has a bucket of its own.
    """
    units: dict[str, list[str]] = {}
    for name in tensors:
        units.setdefault(unit(name), []).append(name)
    result: list[list[str]] = []
    filled = 0
    for names in units.values():
        size = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
        if not result or filled + size > max_bytes:
            result.append([])
            filled = 0
        result[-1] += names
        filled += size
    return result
