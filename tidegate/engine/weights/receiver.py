"""Receives weights from a trainer over process groups; keeps them in host memory until all have arrived."""

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
from tidegate.weights.process_group import (
    DEVICES,
    FLAT,
    HOST,
    JOIN_S,
    WeightsGroup,
    address_towards,
    checksum,
)

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


@dataclass(slots=True)
class IncomingWeights:
    """The tensors of an update received so far, and how to load them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: str | None = None
    keep_cache: bool = False
    checksum: int = 0
    """Checksum of the tensors received so far."""

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.tensors |= tensors
        self.checksum = (self.checksum + checksum(tensors.items())) % MODULUS


class WeightsReceiver:
    """The process groups of this engine and its open update. Methods block.

    `device` is the engine's device. Received tensors stay in host memory until they are loaded.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._groups: dict[str, WeightsGroup] = {}
        self._update: IncomingWeights | None = None

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        """Joins the trainer's group; first leaves a group of the same name. Raises RequestError."""
        supported = [name for name, kind in DEVICES.items() if kind in ("cpu", self._device.type)]
        if backend not in supported:
            raise RequestError(f"backend = {backend!r}: this engine supports {' and '.join(supported)}")
        device = HOST if DEVICES[backend] == "cpu" else self._device
        self.leave(name)
        try:
            store = dist.TCPStore(address, port, size, timeout=timedelta(seconds=JOIN_S))
            own = address_towards(address, port)
            self._groups[name] = WeightsGroup(store, rank, size, name, JOIN_S, own, device)
        except (RuntimeError, OSError) as error:
            raise RequestError(f"cannot join the group {name!r}: {error}") from error

    def leave(self, name: str) -> bool:
        """Leaves a group; returns False if there is none of this name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def begin(self) -> None:
        """Opens an update. Raises RequestError while another one is open."""
        if self._update is not None:
            raise RequestError("an update is already open; close it with /end_weight_update")
        self._update = IncomingWeights()

    def receive(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        load_format: str | None = None,
    ) -> IncomingWeights:
        """Receives tensors (name, type, shape) over a group; returns the open update.

        They come one by one, or with the format FLAT as one tensor of their bytes, in their order.

        Raises RequestError. Leaves the group if the broadcast fails.
        """
        if load_format not in (None, FLAT):
            raise RequestError(f"load_format = {load_format!r}: this engine supports {FLAT!r}, and no format")
        update = self._open()
        if name not in self._groups:
            raise RequestError(f"there is no group {name!r}; create it with /init_weights_update_group")
        unknown = sorted({kind for _, kind, _ in tensors} - DTYPES.keys())
        if unknown:
            raise RequestError(f"unknown dtypes {', '.join(unknown)}; supported: {', '.join(DTYPES)}")
        try:
            like = {
                tensor: torch.empty(tuple(shape), dtype=DTYPES[kind], device="meta")
                for tensor, kind, shape in tensors
            }
            sizes = [one.numel() * one.element_size() for one in like.values()]
            pinned = self._device.type == "cuda"  # copies to and from a GPU are then faster
            data = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
            received = {
                tensor: part.view(one.dtype).reshape(one.shape)
                for (tensor, one), part in zip(like.items(), torch.split(data, sizes), strict=True)
            }
        except (TypeError, RuntimeError) as error:
            raise RequestError(f"shapes: {error}") from None
        try:
            self._groups[name].broadcast([data] if load_format == FLAT else list(received.values()))
        except RuntimeError as error:
            self.leave(name)
            raise RequestError(f"receiving the weights failed: {error}") from error
        update.add(received)
        return update

    def end(self) -> IncomingWeights:
        update, self._update = self._open(), None
        return update

    def _open(self) -> IncomingWeights:
        if self._update is None:
            raise RequestError("no update is open; open one with /begin_weight_update")
        return self._update
