"""A policy whose parameters, gradients and optimiser state are sharded over several processes by FSDP2.

Every rank receives the same calls with the same rows, computes its part of them, and reduces the sums, so
that all ranks take the same decisions. Checkpoints are gathered before they are written and equal those of a
single process, so that a run can resume with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import Microbatch, microbatch
from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.distributed.partition import RankBatch, partition_rows
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.forward import Forward, Prefix, by_row, decoder_layers
from tidegate.trainer.policy.policy import GradientStep, Policy
from tidegate.types import Logprobs

T = TypeVar("T")


class ShardedForward(Forward):
    """Forward pass of a model sharded over all ranks of the process group.

    Each decoder layer is gathered when it is needed and resharded afterwards; the other modules (embedding,
    last norm, head) form one more unit. All ranks must make the same calls. Prefixes are not shared: their
    backward pass would need layers that are resharded by then.
    """

    def __init__(self, model: Any, settings: TrainerSettings) -> None:
        super().__init__(model, settings)  # its checks need the unsharded model
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        if kind == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        root: Any = _RootModule(model, partial(super().__call__, prefix=None))
        # Parameters are gathered in the dtype of computation; gradients are summed in float32.
        precision = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for unit in (*decoder_layers(model), root):
            # Reshard after the forward pass too, as a backward pass may not follow.
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
            # The loss is divided by the N of all ranks, so gradients are summed; gloo has plain sums only.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._sharded = root

    def _set_compute_dtype(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def _can_share(self) -> bool:
        return False

    def __call__(self, batch: Microbatch, prefix: Prefix | None = None) -> tuple[Tensor, Tensor]:
        assert prefix is None
        logprobs_n, entropy_n = self._sharded(batch)
        return logprobs_n, entropy_n

    def batch(self, rows: Sequence[TrainSequence], part: RankBatch) -> Microbatch:
        """Build the microbatch; an empty batch gets the shortest row, as all ranks must compute."""
        usable = [index for index, row in enumerate(rows) if row.mask.any()]
        idle = min(usable, key=lambda index: rows[index].inputs)
        return microbatch(rows, part.rows or [idle], {}).to(self.device)

    @torch.no_grad()
    def logprobs(
        self, rows: Sequence[TrainSequence], max_tokens: int, *, share: bool = False
    ) -> list[Logprobs]:
        """Compute log π of every trained token, on all ranks: a float32 [t] per row, 0 elsewhere."""
        own: dict[int, Logprobs] = {}
        for part in partition_rows(rows, dist.get_world_size(), max_tokens)[dist.get_rank()]:
            batch = self.batch(rows, part)
            logprobs_n, _ = self(batch)
            if part.rows:
                own |= by_row(batch, logprobs_n)
        result = [np.zeros(len(row.ids), dtype=np.float32) for row in rows]
        for logprobs in all_gather(own):
            for index, values in logprobs.items():
                result[index][rows[index].mask] = values
        return result


class _RootModule(torch.nn.Module):
    """Wraps a computation on the model in a module's forward, around which FSDP gathers parameters."""

    def __init__(self, model: Any, compute: Any) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        logprobs_n, entropy_n = self._compute(batch)
        return logprobs_n.clone(), entropy_n  # FSDP hooks outputs, which must not be views


class ShardedPolicy(Policy):
    """One rank of a policy. All ranks of the process group must receive the same calls in the same order."""

    _forward_class: ClassVar[type[Forward]] = ShardedForward
    _forward: ShardedForward

    @staticmethod
    def _load_device(settings: TrainerSettings) -> torch.device:
        return torch.device("cpu")  # unsharded; each rank moves its shards to its device

    @property
    def _is_rank_zero(self) -> bool:
        return dist.get_rank() == 0

    def _gather(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        distinct = {id(tensor): tensor for tensor in live.values()}
        full = {key: _full_tensor(tensor) for key, tensor in distinct.items()}
        return {name: full[id(tensor)] for name, tensor in live.items()} if self._is_rank_zero else {}

    def gather_weight_buckets(self, max_bytes: int) -> None:
        """Take part in rank 0's `weight_buckets`."""
        for _ in self.weight_buckets(max_bytes):
            pass

    def _shard(self, full: Tensor, like: Tensor) -> Tensor:
        return _shard_like(full, like)

    def _broadcast(self, value: bool) -> bool:
        return all_gather(value)[0]

    def state(self) -> dict[str, Any]:
        """Return the state gathered from all ranks; the optimiser's tensors are empty except on rank 0."""
        state = super().state()
        moments = state["optimizer"]["state"]
        for index, tensors in moments.items():
            moments[index] = {name: _full_tensor(value) for name, value in tensors.items()}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        optimizer = dict(state["optimizer"])
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        optimizer["state"] = {
            index: {name: _shard_like(value, parameters[index]) for name, value in tensors.items()}
            for index, tensors in optimizer["state"].items()
        }
        super().load_state({**state, "optimizer": optimizer})

    def _accumulate(
        self, step: GradientStep, rows: Sequence[TrainSequence], diagnostics: Diagnostics
    ) -> None:
        """Add N times the gradient of this rank's rows to the parameters' shards on all ranks."""
        weights, denominator = self._loss.aggregation(rows)
        weighted = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
        parts = partition_rows(weighted, dist.get_world_size(), self.settings.microbatch_tokens)
        for part in parts[dist.get_rank()]:
            batch = self._forward.batch(weighted, part)
            if part.rows:
                step.losses.append(self._backward(batch, None, diagnostics))
            else:
                logprobs_n, _ = self._forward(batch)
                zero = 0.0 * logprobs_n.sum()
                zero.backward()
                step.losses.append(zero.detach())
        step.passes += [part for of_rank in parts for part in of_rank]
        step.rows += rows
        step.denominator += denominator

    def _reduce_sum(self, value: Tensor) -> float:
        if isinstance(value, DTensor):
            return float(value.full_tensor())
        dist.all_reduce(value)
        return float(value)

    def _merge_diagnostics(self, diagnostics: Diagnostics) -> Diagnostics:
        first, *others = all_gather(diagnostics.cpu())
        for other in others:
            first.merge(other)
        return first


def all_gather(own: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def _full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor into rank 0's host memory; empty on other ranks, which must call it too."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if dist.get_rank() == 0 else full.new_empty(0)


def _shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that every rank has in full, with the layout of `like`."""
    if not isinstance(like, DTensor) or full.shape != like.shape:  # AdamW's step count is not sharded
        return full
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(full.to(like.device), mesh, placements, src_data_rank=None)
