"""The process group over which a trainer sends weights to an engine; either end may be SGLang's."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = ("gloo", "cpu:gloo")
"""What SGLang's protocol calls the one there is: from host memory to host memory."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHECKSUM_MODULUS = 2**61 - 1
SLOWEST_BYTES_S = 50e6
"""Weights that come more slowly are given up: a fast network or disk is ten times as fast and more."""


class WeightsGroup:
    """A trainer, rank 0, and an engine.

    It is none of torch's global groups: a process may be in many of them, each with its name, and they may
    come and go one by one. The keys under which its members meet are those of SGLang's custom groups.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, timeout_s: float) -> None:
        """Returns when all members are there. Raises RuntimeError where they are not within `timeout_s`."""
        place = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.name = name
        self._store = store  # the members' connections live as long as it does
        self._timeout_s = timeout_s
        self._group: Any = dist.ProcessGroupGloo(place, rank, size, timedelta(seconds=timeout_s))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values in all members' tensors, in their order. Raises RuntimeError, also where they do
        not come in the time that so many bytes may take."""
        if self._group is None:
            raise RuntimeError(f"the group {self.name!r} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        size = sum(one.numel() * one.element_size() for one in tensors)
        options.timeout = timedelta(seconds=self._timeout_s + transfer_s(size))
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def close(self) -> None:
        """Let go of the connections, which ends them: what other members wait for fails."""
        self._group = None


def transfer_s(size: int) -> float:
    """How long so many bytes of weights may take, beside what any call takes."""
    return size / SLOWEST_BYTES_S


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Of names and bits, whatever the order of the tensors: Σ crc32(name) · Σ words, mod 2^61 − 1.

    The words are the tensor's elements read as integers. It finds what went missing or into the wrong place,
    not a forger.
    """
    total = 0
    for name, tensor in tensors:
        words = tensor.detach().contiguous().view(WORDS[tensor.element_size()])
        total += zlib.crc32(name.encode()) * (1 + int(words.sum(dtype=torch.int64)) % CHECKSUM_MODULUS)
    return total % CHECKSUM_MODULUS


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
