"""Weights that a trainer sends over process groups: kept beside the live ones until all are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tidegate.engine.validation import RequestError
from tidegate.engine.weights.loading import FLOATS
from tidegate.weights.checksum import MODULUS
from tidegate.weights.process_group import DEVICES, HOST, JOIN_S, WeightsGroup, address_towards, checksum

TYPES = {str(one).removeprefix("torch."): one for one in FLOATS}


@dataclass(slots=True)
class IncomingWeights:
    """What came so far, and how it is to be made live."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None
    keep_cache: bool = False
    checksum: int = 0
    """Of the tensors so far."""

    def take(self, tensors: dict[str, Tensor]) -> None:
        self.tensors |= tensors
        self.checksum = (self.checksum + checksum(tensors.items())) % MODULUS


class WeightsReceiver:
    """The groups that this engine is in, and what came of the update that is open. It blocks.

    `device` is what the engine computes on; what comes is kept in host memory until it is made live.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._groups: dict[str, WeightsGroup] = {}
        self._update: IncomingWeights | None = None

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Meet the trainer there; a group of the same name is left. Raises RequestError."""
        known = [one for one, kind in DEVICES.items() if kind in ("cpu", self._device.type)]
        if backend not in known:
            raise RequestError(f"backend = {backend!r}: this engine knows {' and '.join(known)}")
        device = HOST if DEVICES[backend] == "cpu" else self._device
        self.leave(name)
        try:
            store = dist.TCPStore(address, port, size, timeout=timedelta(seconds=JOIN_S))
            own = address_towards(address, port)
            self._groups[name] = WeightsGroup(store, rank, size, name, JOIN_S, own, device)
        except (RuntimeError, OSError) as error:
            raise RequestError(f"the group {name!r} could not be joined: {error}") from error

    def leave(self, name: str) -> bool:
        """Whether there was such a group."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def begin(self) -> None:
        """Open an update. Raises RequestError while one is open."""
        if self._update is not None:
            raise RequestError("an update is open already; /end_weight_update closes it")
        self._update = IncomingWeights()

    def receive(self, name: str, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> IncomingWeights:
        """Take tensors, each (name, type, shape), over a group; returns the update that they belong to.

        Raises RequestError; where the group broke it is left.
        """
        update = self._open()
        if name not in self._groups:
            raise RequestError(f"there is no group {name!r}; /init_weights_update_group makes it")
        unknown = sorted({kind for _, kind, _ in tensors} - TYPES.keys())
        if unknown:
            raise RequestError(f"dtypes: {', '.join(unknown)}; known: {', '.join(TYPES)}")
        try:
            empty = {one: torch.empty(tuple(shape), dtype=TYPES[kind]) for one, kind, shape in tensors}
        except (TypeError, RuntimeError) as error:
            raise RequestError(f"shapes: {error}") from None
        try:
            self._groups[name].broadcast(list(empty.values()))
        except RuntimeError as error:
            self.leave(name)
            raise RequestError(f"the weights did not come: {error}") from error
        update.take(empty)
        return update

    def end(self) -> IncomingWeights:
        """Close the update. Raises RequestError where none is open."""
        update, self._update = self._open(), None
        return update

    def _open(self) -> IncomingWeights:
        if self._update is None:
            raise RequestError("no update is open; /begin_weight_update opens one")
        return self._update
