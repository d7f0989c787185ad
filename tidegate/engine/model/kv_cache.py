"""Slot key-value cache: one row per request, passed to an unmodified model.

Each layer holds keys and values [rows, kv_heads, length, head_dim], which grow as needed. A sequence starts
at the left end of its row, so position p of a sequence is index p of the row. Of a mixture-of-experts model,
the experts of each token are cached beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_STEP = 64
"""Tokens by whose multiples a row's length grows, so that memory is seldom reallocated."""
VIEW_STEP = 16
"""Tokens to whose multiples a decode step's length is rounded up: attention kernels need aligned masks."""


@dataclass(slots=True)
class CachePlace:
    """Target of the current forward pass: rows `first..end`.

    `positions` [rows, tokens] are the positions within the rows; the queries then attend to the first
    `length` keys of these rows. None: the pass writes from position 0 and the queries attend to the new keys
    only.
    """

    first: int = 0
    end: int = 0
    length: int = 0
    tokens: int = 0
    rows: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """Copy of a row's keys and values: (keys, values) of each layer, [kv_heads, length, head_dim]."""

    layers: list[tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
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
        """Writes in place; returns the keys and values that the queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.place
        self.reserve(place.end, place.length)
        if place.positions is None:
            self.keys[place.first : place.end, :, : place.length] = key_states
            self.values[place.first : place.end, :, : place.length] = value_states
            return key_states, value_states
        if place.tokens == 1:  # cheaper than the general case below
            self.keys[place.rows, :, place.positions] = key_states[:, :, 0]
            self.values[place.rows, :, place.positions] = value_states[:, :, 0]
        else:
            self.keys[place.rows, :, place.positions] = key_states.transpose(1, 2)
            self.values[place.rows, :, place.positions] = value_states.transpose(1, 2)
        rows = slice(place.first, place.end)
        return self.keys[rows, :, : place.length], self.values[rows, :, : place.length]

    def reserve(self, rows: int, length: int) -> None:
        old_rows, old_length = self.keys.shape[0], self.keys.shape[2]
        if rows <= old_rows and length <= old_length:
            return
        if rows > old_rows:
            rows = min(max(rows, 2 * old_rows), self.max_rows)
        rows = max(rows, old_rows)
        length = max(round_up(length, GROWTH_STEP), old_length)
        self.keys = _grown(self.keys, rows, length)
        self.values = _grown(self.values, rows, length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.place.positions is None else self.place.length), 0

    def get_seq_length(self) -> int:
        return 0 if self.place.positions is None else self.place.length - self.place.tokens

    def get_max_length(self) -> int:
        return -1


def _grown(old: Tensor, rows: int, length: int) -> Tensor:
    # Zeros, not uninitialised memory: a masked key still enters the product, and 0 · NaN is NaN.
    new = old.new_zeros((rows, old.shape[1], length, old.shape[3]))
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers. `begin` and `extend` set the target of the next forward pass."""

    def __init__(self, layers: int, max_rows: int, device: torch.device) -> None:
        self.place = CachePlace()
        super().__init__(layers=[SlotLayer(self.place, max_rows) for _ in range(layers)])
        self._experts = SlotLayer(self.place, max_rows)
        """Its keys are the experts' ids, int16 [rows, 1, length, layers · k], 0 in dense layers."""
        self._row_numbers = torch.arange(max_rows, device=device)

    def begin(self, first: int, count: int, length: int) -> None:
        """Makes the next pass write `length` tokens from position 0 in rows first..first+count."""
        place = self.place
        place.first, place.end = first, first + count
        place.length = place.tokens = length
        place.rows = place.positions = None

    def extend(self, first: int, positions: Tensor, length: int) -> None:
        """Makes the next pass write at `positions` [rows, tokens] of rows first.., and attend to `length`
        keys."""
        place = self.place
        count, place.tokens = positions.shape
        place.first, place.end, place.length = first, first + count, length
        rows = self._row_numbers[first : place.end]
        if place.tokens == 1:
            place.rows, place.positions = rows, positions[:, 0]
        else:
            place.rows, place.positions = rows[:, None], positions

    @property
    def _stored(self) -> list[SlotLayer]:
        """What is stored for each token."""
        return [*self.layers, *([self._experts] if self._experts.is_initialized else [])]

    def write_experts(self, layer: int, ids: Tensor) -> None:
        """Writes the experts [rows · tokens, k] that a layer chose in the current pass."""
        place, experts, k = self.place, self._experts, ids.shape[-1]
        if not experts.is_initialized:
            shape = ids.new_zeros((1, 1, 1, len(self.layers) * k), dtype=torch.int16)
            experts.lazy_initialization(shape, shape[..., :0])
        experts.reserve(place.end, place.length)
        own = slice(layer * k, (layer + 1) * k)
        if place.positions is None:
            shown = ids.view(place.end - place.first, place.length, k)
            experts.keys[place.first : place.end, 0, : place.length, own] = shown.short()
        else:
            shown = ids.view(*place.positions.shape, k)
            experts.keys[place.rows, 0, place.positions, own] = shown.short()

    def experts(self, row: int, start: int, end: int) -> npt.NDArray[np.int32]:
        """Returns the experts of the tokens `start..end` of a row, [tokens, layers · k]."""
        found: npt.NDArray[np.int32] = self._experts.keys[row, 0, start:end].int().cpu().numpy()
        return found

    @torch.inference_mode()
    def snapshot(self, row: int, length: int) -> RowSnapshot:
        return RowSnapshot(
            [
                (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
                for layer in self._stored
            ]
        )

    @torch.inference_mode()
    def restore(self, row: int, snapshot: RowSnapshot, length: int) -> None:
        """Copies the first `length` keys and values of a snapshot into a row."""
        stored = [*self.layers, self._experts][: len(snapshot.layers)]
        for layer, (keys, values) in zip(stored, snapshot.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.reserve(row + 1, length)
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` keys and values of the source row to the target row."""
        for layer in self._stored:
            for values in (layer.keys, layer.values):
                values[target, :, :length] = values[source, :, :length]

    @torch.inference_mode()
    def zero_row(self, row: int) -> None:
        """Zeroes a row that may hold values that are not finite, which would affect its next sequence."""
        for layer in self.layers:
            layer.keys[row] = 0
            layer.values[row] = 0

    def drop(self) -> None:
        for layer in self._stored:
            if layer.is_initialized:
                del layer.keys, layer.values
                layer.is_initialized = False


def round_up(length: int, step: int) -> int:
    return -(-length // step) * step
