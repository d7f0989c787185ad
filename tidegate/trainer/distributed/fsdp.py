"""Ranks of a policy whose parameters, gradients and optimiser state are sharded by FSDP2.

Every rank receives the same calls with the same rows, computes its part of them, and reduces the sums, so
that all ranks take the same decisions. Checkpoints are gathered before they are written and equal those of a
single process, so that a run can resume with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import (
    ForwardPass,
    Microbatch,
    PrefixBatch,
    microbatch,
    split_by_length,
)
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy.forward import TokenLogprobs, decoder_layers
from tidegate.trainer.policy.ranks import Compute, Ranks

T = TypeVar("T")


class FSDPRanks(Ranks):
    """All ranks of the process group. Each must make the same calls in the same order.

    Args:
        settings: the `[trainer]` settings.
        call: context in which rank 0 calls a method of the policy, which makes the other ranks call it.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        call: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
    ) -> None:
        super().__init__(settings)
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._call = call

    def call(self, method: str, *arguments: object, **options: object) -> AbstractContextManager[None]:
        return self._call(method, *arguments, **options)

    def load_device(self) -> torch.device:
        return torch.device("cpu")  # unsharded; each rank moves its shards to its device

    def shard_model(self, model: Any, compute: Compute, dtype: torch.dtype) -> tuple[Compute, torch.device]:
        """Shard a model over all ranks.

        Each decoder layer is gathered when it is needed and resharded afterwards; the other modules
        (embedding, last norm, head) form one more unit.
        """
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        mesh = init_device_mesh(kind, (self.count,))
        root: Any = _RootModule(model, compute)
        # Parameters are gathered in the dtype of computation; gradients are summed in float32.
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for unit in (*decoder_layers(model), root):
            # Reshard after the forward pass too, as a backward pass may not follow.
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
            # The loss is divided by the N of all ranks, so gradients are summed; gloo has plain sums only.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return root, device

    def layout(
        self, rows: Sequence[TrainingSequence], max_tokens: int, *, share: bool
    ) -> tuple[list[PrefixBatch], list[ForwardPass]]:
        """Partition rows over the ranks. A rank without rows computes the shortest one, for nothing.

        Prefixes are not shared: their backward pass would need layers that are resharded by then.
        """
        parts = partition_rows(rows, self.count, max_tokens)
        own = [PrefixBatch([], [self._microbatch(rows, part.rows)]) for part in parts[self.rank]]
        return own, [part for of_rank in parts for part in of_rank]

    def _microbatch(self, rows: Sequence[TrainingSequence], chosen: list[int]) -> Microbatch:
        if chosen:
            return microbatch(rows, chosen, {})
        usable = [index for index, row in enumerate(rows) if row.mask.any()]
        idle = microbatch(rows, [min(usable, key=lambda index: rows[index].inputs)], {})
        return replace(idle, idle=True, weights_n=torch.zeros_like(idle.weights_n))

    def gather(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        distinct = {id(tensor): tensor for tensor in live.values()}
        full = {key: self._full(tensor) for key, tensor in distinct.items()}
        return {name: full[id(tensor)] for name, tensor in live.items()} if self.rank == 0 else {}

    def _full(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor into rank 0's host memory; empty on other ranks."""
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().cpu() if self.rank == 0 else full.new_empty(0)

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or full.shape != like.shape:  # AdamW's step count is not sharded
            return full
        mesh, placements = like.device_mesh, like.placements
        return distribute_tensor(full.to(like.device), mesh, placements, src_data_rank=None)

    def sum(self, value: Tensor) -> float:
        if isinstance(value, DTensor):
            return float(value.full_tensor())
        dist.all_reduce(value)
        return float(value)

    def collect(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values


class _RootModule(torch.nn.Module):
    """Wraps a computation on the model in a module's forward, around which FSDP gathers parameters."""

    def __init__(self, model: Any, compute: Compute) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Microbatch, prefix: None = None) -> TokenLogprobs:
        logprobs_n, entropy_n, top_nk = self._compute(batch, prefix)
        # FSDP hooks outputs, which must not be views.
        return TokenLogprobs(logprobs_n.clone(), entropy_n, None if top_nk is None else top_nk.clone())


@dataclass(slots=True)
class RankBatch:
    """A rank's microbatch in one forward pass; it may be empty."""

    rows: list[int]
    """Indices of the rows in the batch."""
    positions: int = 0
    """Inputs with padding."""
    tokens: int = 0
    """Inputs without padding."""


def partition_rows(rows: Sequence[TrainingSequence], ranks: int, max_tokens: int) -> list[list[RankBatch]]:
    """Assign rows to ranks; returns each rank's batches, of which all ranks have the same number.

    Sharded ranks compute layer by layer in lockstep, so each pass must be of similar size on all ranks, not
    only the sum. Rows are therefore assigned in descending order of length, one to each rank in alternating
    direction, and all ranks split them at the same places. A batch has at most `max_tokens` positions, unless
    a single row is longer. Rows without a trained token are left out. Deterministic on every rank.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    lengths = {index: rows[index].inputs for index in usable}
    order = sorted(usable, key=lambda index: (-lengths[index], index))
    rounds = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    batches: list[list[RankBatch]] = [[] for _ in range(ranks)]
    for start, end in split_by_length([lengths[indices[0]] for indices in rounds], max_tokens):
        assigned: list[list[int]] = [[] for _ in range(ranks)]
        for number in range(start, end):
            for at, index in enumerate(rounds[number]):
                assigned[at if number % 2 == 0 else ranks - 1 - at].append(index)
        for rank, indices in enumerate(assigned):
            inputs = [lengths[index] for index in indices]
            batches[rank].append(RankBatch(indices, len(inputs) * max(inputs, default=0), sum(inputs)))
    return batches
