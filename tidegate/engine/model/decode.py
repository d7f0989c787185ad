"""One decode step for every row: kernel by kernel, or recorded once for each size and replayed.

Decoding a few rows launches hundreds of kernels that each take less time than their launch. A CUDA graph is
launched once. It repeats the kernels with the addresses and sizes that they were recorded with, so a
recorded step reads its inputs from buffers that stay where they are, and is of a `Size`: more rows than are
there are padded, and keys beyond a row's length are masked. It stays valid while its addresses do: new
weights are copied over the old ones; where the cache's memory moves, all recordings are made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate.engine.model.device import refill, upload
from tidegate.engine.model.kv_cache import VIEW_STEP, SlotCache, rounded
from tidegate.engine.model.sampling import drawn, has_own_rules, read, sample, temperatures
from tidegate.engine.model.sampling import draws as draws_of
from tidegate.engine.scheduling.slots import Slots

log = logging.getLogger("tidegate.engine")

Sampled = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
Attend = Callable[[Tensor, Tensor, int], Tensor]
"""(ids, positions, both [rows, tokens]; how many keys are seen) → logits of the last column [rows, vocab]."""
Replay = Callable[[], object]
Recorder = Callable[[Replay], Replay]
"""Records what a function does on the device, without doing it; gives what does it again."""

SHORTEST = 64
"""Sizes differ by at least so many keys, and by an eighth to a quarter of their length."""


class Steps(Protocol):
    """Decode steps; each caches the rows' input tokens."""

    def logits(self, slots: Slots) -> Tensor:
        """The next token's logits for every row, [rows, vocab]; they hold until the next step."""

    def sample(self, slots: Slots) -> Sampled:
        """One token for every row: (ids, logprobs), both [rows]."""


class Eager:
    """Kernel by kernel."""

    def __init__(self, attend: Attend, cache: SlotCache, device: torch.device) -> None:
        self._attend = attend
        self._cache = cache
        self._device = device

    def logits(self, slots: Slots) -> Tensor:
        n = slots.count
        positions = upload(slots.lengths[:n, None], self._device)
        length = rounded(int(slots.lengths[:n].max()) + 1, VIEW_STEP)
        self._cache.extend(0, positions, length)
        return self._attend(upload(slots.tokens[:n, None], self._device), positions, length)

    def sample(self, slots: Slots) -> Sampled:
        return sample(self.logits(slots), slots)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a recorded step: how many rows, and how many keys they see."""

    rows: int
    length: int

    @classmethod
    def holding(cls, rows: int, length: int, max_rows: int, max_length: int) -> Size:
        """The smallest that has room for so many: rows in powers of two, from 16 on also one and a half."""
        power = 1 << (rows - 1).bit_length()
        if power > 16 and rows <= power * 3 // 4:
            power = power * 3 // 4
        step = max(SHORTEST, (1 << (length - 1).bit_length()) // 8)
        return cls(min(power, max_rows), min(rounded(length, step), rounded(max_length, VIEW_STEP)))


class Recorded:
    """Steps that are recorded when their size first comes up.

    `recorder` gives what records, anew whenever all recordings are dropped. Where a step cannot be
    recorded, this and all later ones run kernel by kernel, and the log says so, once.
    """

    def __init__(
        self,
        attend: Attend,
        cache: SlotCache,
        device: torch.device,
        max_rows: int,
        max_length: int,
        recorder: Callable[[], Recorder],
    ) -> None:
        self._attend = attend
        self._cache = cache
        self._max_rows, self._max_length = max_rows, max_length
        self._make_recorder = recorder
        self._record = recorder()
        self._plain = Eager(attend, cache, device)
        self._broken = False
        self._replays: dict[Size, Replay] = {}
        self._moves = cache.moves
        # What a step reads: ids, positions, rows to write to; draws, temperatures, whether greedy.
        self._whole = torch.zeros((3, max_rows), dtype=torch.int64, device=device)
        self._real = torch.zeros((3, max_rows), dtype=torch.float64, device=device)
        # And what it writes.
        self._logits: Tensor | None = None
        self._drawn = torch.zeros((2, max_rows), dtype=torch.float64, device=device)

    @property
    def sizes(self) -> list[Size]:
        """What is recorded."""
        return list(self._replays)

    def logits(self, slots: Slots) -> Tensor:
        if not self._step(slots):
            return self._plain.logits(slots)
        assert self._logits is not None
        return self._logits[: slots.count]

    def sample(self, slots: Slots) -> Sampled:
        if not self._step(slots):
            return self._plain.sample(slots)
        if has_own_rules(slots).any():
            assert self._logits is not None
            return sample(self._logits[: slots.count], slots)
        return read(self._drawn[:, : slots.count])

    def give_up(self, why: object) -> bool:
        """Run kernel by kernel from now on; False where that is so already."""
        if self._broken:
            return False
        log.warning(
            "decode steps are not recorded (%s): they run kernel by kernel, which is slower for few rows", why
        )
        self._broken = True
        self._replays.clear()
        return True

    def _step(self, slots: Slots) -> bool:
        """Run one; False, and nothing done, where steps cannot be recorded."""
        if self._broken:
            return False
        length = int(slots.lengths[: slots.count].max()) + 1
        size = Size.holding(slots.count, length, self._max_rows, self._max_length)
        self._fill(slots, size)
        self._forget_if_moved()
        if size not in self._replays:
            self._compute(size)  # as it is: kernels are loaded and the cache grows, which cannot be recorded
            self._forget_if_moved()
            try:
                self._replays[size] = self._record(partial(self._compute, size))
            except RuntimeError as error:  # torch's word for all that a device refuses
                self.give_up(error)
                return False
        self._replays[size]()
        return True

    def _fill(self, slots: Slots, size: Size) -> None:
        """Lay out the inputs. A padding row is a token 0 at position 0, written to the row after the size's
        last: where there is padding, that one is neither running nor half prefilled."""
        n = slots.count
        whole = np.zeros((3, self._max_rows), np.int64)
        whole[0, :n], whole[1, :n] = slots.tokens[:n], slots.lengths[:n]
        whole[2, :n], whole[2, n:] = np.arange(n), size.rows
        real = np.ones((3, self._max_rows))
        greedy, scales = temperatures(slots)
        real[0, :n], real[1, :n], real[2, :n] = draws_of(slots), scales, greedy
        refill(self._whole, whole)
        refill(self._real, real)

    def _compute(self, size: Size) -> None:
        """What is recorded: the model and, for rows without rules of their own, the draw."""
        ids, positions, rows = self._whole[:, : size.rows]
        draws, scales, greedy = self._real[:, : size.rows]
        self._cache.scatter(rows, positions, size.length, reach=size.rows + 1)
        logits = self._attend(ids[:, None], positions[:, None], size.length)
        if self._logits is None:
            self._logits = logits.new_zeros((self._max_rows, logits.shape[-1]))
        self._logits[: size.rows].copy_(logits)
        self._drawn[:, : size.rows].copy_(drawn(logits, scales.float(), draws, greedy > 0))

    def _forget_if_moved(self) -> None:
        """Recordings refer to where the cache was when they were made."""
        if self._cache.moves != self._moves:
            self._replays.clear()
            self._record = self._make_recorder()
            self._moves = self._cache.moves


class CudaGraphs:
    """Records on a CUDA device; all its graphs share one pool of memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Raises RuntimeError where `run` does what cannot be recorded, such as waiting for the device."""
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._stream.device)
        try:
            # Other threads may use the device meanwhile: they read new weights.
            with (
                torch.cuda.device(self._stream.device),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                run()
        except RuntimeError:
            torch.cuda.set_stream(before)  # torch leaves its own in place where the end of a capture fails
            raise
        return graph.replay
