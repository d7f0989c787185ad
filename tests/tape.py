"""A recorder of tensor operations for the CPU, as deaf as a CUDA graph: what is replayed are the operations
alone, on the very memory and with the very numbers of the time of recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for then, now in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():  # no view, not in place
                    then.copy_(now)


class Tapes:
    """Makes recorders, and counts what they recorded and replayed."""

    def __init__(self) -> None:
        self.recorders = 0
        self.recorded = 0
        self.replayed = 0

    def __call__(self) -> Callable[[Callable[[], object]], Callable[[], None]]:
        self.recorders += 1
        return self._record

    def _record(self, run: Callable[[], object]) -> Callable[[], None]:
        self.recorded += 1
        with Tape() as tape, torch.inference_mode():
            run()

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay
