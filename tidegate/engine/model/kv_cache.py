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
class CachePlace:
    """Where the forward pass that runs now writes: rows `first..end`.

    `positions` [rows, tokens] says where in the rows; the queries then see the first `length` keys of
    these rows. None: from position 0 on, with nothing before, and the queries see the new keys alone.
    """

    first: int = 0
    end: int = 0
    length: int = 0
    tokens: int = 0
    rows: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """A row's keys and values, copied: (keys, values) of each layer, [kv_heads, length, head_dim]."""

    layers: list[tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values."""

    is_sliding = False

    def __init__(self, place: CachePlace, max_rows: int) -> None:
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
        if self.keys.shape[0] < place.end or self.keys.shape[2] < place.length:
            self._grow(place.end, place.length)
        if place.positions is None:
            self.keys[place.first : place.end, :, : place.length] = key_states
            self.values[place.first : place.end, :, : place.length] = value_states
            return key_states, value_states
        if place.tokens == 1:  # the same, cheaper
            self.keys[place.rows, :, place.positions] = key_states[:, :, 0]
            self.values[place.rows, :, place.positions] = value_states[:, :, 0]
        else:
            self.keys[place.rows, :, place.positions] = key_states.transpose(1, 2)
            self.values[place.rows, :, place.positions] = value_states.transpose(1, 2)
        rows = slice(place.first, place.end)
        return self.keys[rows, :, : place.length], self.values[rows, :, : place.length]

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

    def snapshot(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self.keys[row, :, :length].clone(), self.values[row, :, :length].clone()

    def restore(self, row: int, keys: Tensor, values: Tensor, length: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        if self.keys.shape[0] <= row or self.keys.shape[2] < length:
            self._grow(row + 1, length)
        self.keys[row, :, :length] = keys[:, :length]
        self.values[row, :, :length] = values[:, :length]

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
        return 0 if self.place.positions is None else self.place.length - self.place.tokens

    def get_max_length(self) -> int:
        return -1


def _larger(held: Tensor, rows: int, length: int) -> Tensor:
    # Zeros, not what memory held: a masked key still enters the product, and 0 · NaN is NaN.
    larger = held.new_zeros((rows, held.shape[1], length, held.shape[3]))
    larger[: held.shape[0], :, : held.shape[2]] = held
    return larger


class SlotCache(Cache):  # type: ignore[misc]
    """All layers. `begin` or `extend` says where the next forward pass writes."""

    def __init__(self, layers: int, max_rows: int, device: torch.device) -> None:
        self.place = CachePlace()
        super().__init__(layers=[SlotLayer(self.place, max_rows) for _ in range(layers)])
        self._row_numbers = torch.arange(max_rows, device=device)

    def begin(self, first: int, count: int, length: int) -> None:
        """The next pass writes `length` tokens from position 0 on, in rows first..first+count."""
        place = self.place
        place.first, place.end = first, first + count
        place.length = place.tokens = length
        place.rows = place.positions = None

    def extend(self, first: int, positions: Tensor, length: int) -> None:
        """The next pass writes at `positions` [rows, tokens] of rows first.., and sees `length` keys."""
        place = self.place
        count, place.tokens = positions.shape
        place.first, place.end, place.length = first, first + count, length
        rows = self._row_numbers[first : place.end]
        if place.tokens == 1:
            place.rows, place.positions = rows, positions[:, 0]
        else:
            place.rows, place.positions = rows[:, None], positions

    def snapshot(self, row: int, length: int) -> RowSnapshot:
        return RowSnapshot([layer.snapshot(row, length) for layer in self.layers])

    def restore(self, row: int, snapshot: RowSnapshot, length: int) -> None:
        """Put the first `length` keys and values of a snapshot into a row."""
        for layer, (keys, values) in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(row, keys, values, length)

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
