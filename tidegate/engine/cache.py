"""The slot key-value cache: one row per request, taken by an unmodified model as `past_key_values`.

Each layer holds keys and values [rows, kv_heads, length, head_dim], grown as needed. A sequence lies
at the left of its row, so position p of a sequence is index p of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_STEP = 64
"""A row's length grows by multiples of this, so that memory is seldom allocated anew."""
VIEW_STEP = 16
"""A decode step sees lengths rounded up to this: attention kernels want masks that are aligned."""


@dataclass(slots=True)
class Place:
    """Where the forward pass that runs now writes.

    Prefill (`positions` None): the new keys, positions 0.., go to rows `first..first+count`.
    Decode: row r, of rows 0..count, gets one key at `positions[r]`, and attends to `length` keys.
    """

    first: int = 0
    count: int = 0
    length: int = 0
    rows: Tensor | None = None
    positions: Tensor | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, place: Place, max_rows: int) -> None:
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self.place = place
        self.max_rows = max_rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write in place; returns what the queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.place
        end = place.first + place.count
        if self.keys.shape[0] < end or self.keys.shape[2] < place.length:
            self._grow(end, place.length)
        if place.positions is None:
            self.keys[place.first : end, :, : place.length] = key_states
            self.values[place.first : end, :, : place.length] = value_states
            return key_states, value_states
        self.keys[place.rows, :, place.positions] = key_states[:, :, 0]
        self.values[place.rows, :, place.positions] = value_states[:, :, 0]
        return self.keys[:end, :, : place.length], self.values[:end, :, : place.length]

    def _grow(self, rows: int, length: int) -> None:
        held_rows, held_length = self.keys.shape[0], self.keys.shape[2]
        if rows > held_rows:
            rows = min(max(rows, 2 * held_rows), self.max_rows)
        rows = max(rows, held_rows)
        length = max(rounded(length, GROWTH_STEP), held_length)
        self.keys = _larger(self.keys, rows, length)
        self.values = _larger(self.values, rows, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def clean(self, row: int) -> None:
        self.keys[row] = 0
        self.values[row] = 0

    def drop(self) -> None:
        if self.is_initialized:
            del self.keys, self.values
            self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.place.positions is None else self.place.length), 0

    def get_seq_length(self) -> int:
        return 0 if self.place.positions is None else self.place.length - 1

    def get_max_length(self) -> int:
        return -1


def _larger(held: Tensor, rows: int, length: int) -> Tensor:
    # Zeros, not what memory held: a masked key still enters the product, and 0 · NaN is NaN.
    larger = held.new_zeros((rows, held.shape[1], length, held.shape[3]))
    larger[: held.shape[0], :, : held.shape[2]] = held
    return larger


class SlotCache(Cache):  # type: ignore[misc]
    """All layers. `prefill` or `decode` says where the next forward pass writes."""

    def __init__(self, layers: int, max_rows: int, device: torch.device) -> None:
        self.place = Place()
        super().__init__(layers=[SlotLayer(self.place, max_rows) for _ in range(layers)])
        self._row_numbers = torch.arange(max_rows, device=device)

    def prefill(self, first: int, count: int, length: int) -> None:
        place = self.place
        place.first, place.count, place.length = first, count, length
        place.rows = place.positions = None

    def decode(self, count: int, positions: Tensor, length: int) -> None:
        place = self.place
        place.first, place.count, place.length = 0, count, length
        place.rows, place.positions = self._row_numbers[:count], positions

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` keys and values of one row over those of another."""
        for layer in self.layers:
            layer.move(source, target, length)

    def clean(self, row: int) -> None:
        """Zero a row that may hold values that are not finite; the next sequence there would see them."""
        for layer in self.layers:
            layer.clean(row)

    def drop(self) -> None:
        """Forget everything and free the memory."""
        for layer in self.layers:
            layer.drop()


def rounded(length: int, step: int) -> int:
    return -(-length // step) * step
