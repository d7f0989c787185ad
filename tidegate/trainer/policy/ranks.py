"""The ranks of a policy: here one process that holds all of it; `distributed/fsdp.py` has several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.devices import find_device
from tidegate.errors import TrainingError
from tidegate.trainer.batch.microbatch import PrefixBatch
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.share import RankShare
from tidegate.trainer.checkpoint import shards
from tidegate.trainer.checkpoint.huggingface import read_model

HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""Text of torch's RuntimeError when host memory is exhausted."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with the options of torch's allocator on GPUs."""
Compute = Callable[..., Any]
"""(microbatch, prefix) → `TokenLogprobs` of the trained tokens."""
T = TypeVar("T")


class Ranks:
    """What a policy does with its other ranks; a single rank has none.

    Attributes:
        rank: number of this rank. Rank 0 writes files.
        count: number of ranks.
        one_length: whether the shared prefixes of a microbatch have one length, so that it needs no mask.
    """

    rank = 0
    count = 1

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        # A mask costs little on a CPU, and more microbatches would.
        self.one_length = settings.device != "cpu"

    def call(self, method: str, *arguments: object, **options: object) -> AbstractContextManager[None]:
        """Return the context in which this rank calls a method of the policy, and the other ranks too.

        With the option `shares`, an item for each rank, each rank gets its own as the first argument. The
        context raises TrainingError if memory is exhausted.
        """
        return self._translate_out_of_memory()

    @contextmanager
    def _translate_out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            why = out_of_memory(error, self.settings)
            if why is None:
                raise
            raise TrainingError(f"the trainer is {why}") from error

    def read_model(self, path: Path) -> Any:
        """Load a causal LM in float32 on the settings' device.

        Several ranks load it on rank 0 only, in host memory; the others build it without memory, on the meta
        device. Raises ConfigError, StartError, on all ranks.
        """
        device = find_device("trainer.device", self.settings.device)
        return read_model(path).to(device)

    def agree(self, value: Callable[[], T]) -> T:
        """Return a value that rank 0 computes, and sends to the others."""
        return value()

    def outline(self, read: Callable[[], T]) -> T:
        """Return a tree with tensors that rank 0 reads; on the other ranks large ones are on the meta device.

        Raises the errors of `read` on all ranks.
        """
        return read()

    def shard_model(self, model: Any, compute: Compute, dtype: torch.dtype) -> tuple[Compute, torch.device]:
        """Shard a model; returns its computation in this dtype, and the device of its inputs."""
        return compute, next(model.parameters()).device

    def add_replicas(self, compute: Compute, after_next: bool) -> None:
        """Set whether the next backward pass of a sharded model adds the gradients of its replicas.

        Otherwise each replica keeps its sum for a later pass.
        """

    def split(self, whole: RankShare) -> list[RankShare]:
        """Split a share that holds all rows; returns each rank's."""
        return [whole]

    def layout(self, share: RankShare, *, share_prefixes: bool) -> list[PrefixBatch]:
        """Group this rank's rows into microbatches."""
        return prefix_batches(
            share.rows, self.settings.microbatch_tokens, share=share_prefixes, one_length=self.one_length
        )

    def gather(self, live: Mapping[str, Tensor], *, on_device: bool = False) -> dict[str, Tensor]:
        """Return the unsharded tensors on rank 0, and none on other ranks; tied tensors stay tied.

        Several ranks return them in host memory, or on rank 0's device.
        """
        return {name: tensor.detach() for name, tensor in live.items()}

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that rank 0 has in full, with the layout of `like`.

        The other ranks have it on the meta device, or, if it is small, as rank 0 has it.
        """
        return full

    def begin_save(self, tensors: dict[str, Tensor], directory: Path) -> Callable[[], None]:
        """Copy sharded tensors, and write the copies in threads; a single rank has none.

        Returns:
            Waits until all ranks have written. It raises OSError, or TrainingError if a rank has exited.
        """
        return lambda: None

    def load_shards(self, tensors: dict[str, Tensor], directory: Path) -> None:
        """Read what `begin_save` wrote into tensors with the layout of these ranks; raises OSError."""
        shards.load(tensors, directory, None)

    def sum(self, value: Tensor) -> float:
        """Sum a scalar over all ranks."""
        return float(value)

    def collect(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        return [value]


def out_of_memory(error: Exception, settings: TrainerSettings) -> str | None:
    """Describe an out-of-memory error and its remedy; None for other errors."""
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and HOST_MEMORY not in str(error):
        return None
    lines = str(error).strip().splitlines() or [type(error).__name__]
    remedy = f"lower trainer.microbatch_tokens (it is {settings.microbatch_tokens})"
    if settings.device.startswith("cuda") and not any(name in os.environ for name in ALLOCATOR):
        remedy += f", or set {ALLOCATOR[0]}=expandable_segments:True, which wastes less memory,"
    return f"out of memory on {settings.device}: {lines[0]}; {remedy} and continue with --resume"
