"""A policy whose parameters, gradients and optimiser state are sharded over several processes by FSDP2.

Every rank is given the same calls with the same rows, computes the part of them that it is dealt, and has
the same sums in the end: so all decide alike. What is written is gathered first, and is what one process
writes: a run can go on with another number of ranks.
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
from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.distributed.partition import RankBatch, partition_rows
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.forward import Forward, Prefix, by_row, decoder_layers
from tidegate.trainer.policy.microbatch import Microbatch, microbatch
from tidegate.trainer.policy.policy import GradientStep, Policy
from tidegate.types import Logprobs

T = TypeVar("T")


class ShardedForward(Forward):
    """The way forward of a model that all ranks of the process group hold a shard of.

    Each decoder layer is a unit that is gathered when it is due and let go again; what remains (embedding,
    last norm, head) is one more. All ranks call it alike. Rows go whole: prefixes' keys and values would
    lead through layers whose parameters are gone by then.
    """

    def __init__(self, model: Any, settings: TrainerSettings) -> None:
        super().__init__(model, settings)  # tried while the model is whole
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        if kind == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        whole: Any = _Whole(model, partial(super().__call__, prefix=None))
        # Parameters are gathered in the type that is computed in; gradients are summed as they are kept.
        precision = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for unit in (*decoder_layers(model), whole):
            # Let go after the way forward too: otherwise the parameters are whole ones until a way back.
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
            # The loss is divided by the N of all ranks, so gradients are summed: plainly, as gloo can, too.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._sharded = whole

    def _compute_in(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def _may_share(self) -> bool:
        return False

    def __call__(self, batch: Microbatch, prefix: Prefix | None = None) -> tuple[Tensor, Tensor]:
        assert prefix is None
        logprobs_n, entropy_n = self._sharded(batch)
        return logprobs_n, entropy_n

    def batch(self, rows: Sequence[TrainSequence], hand: RankBatch) -> Microbatch:
        """The hand's microbatch; of an empty hand the shortest row, so that this rank is in step with those
        that have more to do."""
        usable = [index for index, row in enumerate(rows) if row.mask.any()]
        idle = min(usable, key=lambda index: rows[index].inputs)
        return microbatch(rows, hand.rows or [idle], {}).to(self.device)

    @torch.no_grad()
    def logprobs(
        self, rows: Sequence[TrainSequence], max_tokens: int, *, share: bool = False
    ) -> list[Logprobs]:
        """log π of every trained token, by all ranks together; float32 [t] a row, 0 elsewhere."""
        own: dict[int, Logprobs] = {}
        for hand in partition_rows(rows, dist.get_world_size(), max_tokens)[dist.get_rank()]:
            batch = self.batch(rows, hand)
            logprobs_n, _ = self(batch)
            if hand.rows:
                own |= by_row(batch, logprobs_n)
        found = [np.zeros(len(row.ids), dtype=np.float32) for row in rows]
        for part in gathered(own):
            for index, values in part.items():
                found[index][rows[index].mask] = values
        return found


class _Whole(torch.nn.Module):
    """A model with what is computed of it, as a module's forward: where FSDP gathers parameters."""

    def __init__(self, model: Any, compute: Any) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        logprobs_n, entropy_n = self._compute(batch)
        return logprobs_n.clone(), entropy_n  # FSDP hooks on to what comes out, which must not be a view


class ShardedPolicy(Policy):
    """One rank of a policy. All ranks of the process group are given the same calls, in the same order."""

    _way: ClassVar[type[Forward]] = ShardedForward
    _forward: ShardedForward

    @staticmethod
    def _loaded_on(settings: TrainerSettings) -> torch.device:
        return torch.device("cpu")  # whole; each rank's device gets its shards

    @property
    def _leads(self) -> bool:
        return dist.get_rank() == 0

    def _gathered(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        once = {id(one): one for one in live.values()}
        whole = {key: _gather(one) for key, one in once.items()}
        return {name: whole[id(one)] for name, one in live.items()} if self._leads else {}

    def help_with_weights(self, most_bytes: int) -> None:
        """Other ranks' part in rank 0's `weight_buckets`."""
        for _ in self.weight_buckets(most_bytes):
            pass

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        return _shard(whole, like)

    def _agreed(self, verdict: bool) -> bool:
        return gathered(verdict)[0]

    def state(self) -> dict[str, Any]:
        """That of all ranks, gathered; on other ranks than 0 without the optimiser's."""
        state = super().state()
        moments = state["optimizer"]["state"]
        for index, of_one in moments.items():
            moments[index] = {name: _gather(value) for name, value in of_one.items()}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        optimizer = dict(state["optimizer"])
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        optimizer["state"] = {
            index: {name: _shard(value, parameters[index]) for name, value in of_one.items()}
            for index, of_one in optimizer["state"].items()
        }
        super().load_state({**state, "optimizer": optimizer})

    def _descend(
        self, descent: GradientStep, rows: Sequence[TrainSequence], diagnostics: Diagnostics
    ) -> None:
        """Add the gradient of this rank's rows, times N, to the parameters' shards on all ranks."""
        weights, denominator = self._loss.aggregation(rows)
        weighted = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
        hands = partition_rows(weighted, dist.get_world_size(), self.settings.microbatch_tokens)
        for hand in hands[dist.get_rank()]:
            batch = self._forward.batch(weighted, hand)
            if hand.rows:
                descent.losses.append(self._backward(batch, None, diagnostics))
            else:
                logprobs_n, _ = self._forward(batch)
                nothing = 0.0 * logprobs_n.sum()
                nothing.backward()
                descent.losses.append(nothing.detach())
        descent.passes += [hand for dealt in hands for hand in dealt]
        descent.rows += rows
        descent.denominator += denominator

    def _whole(self, value: Tensor) -> float:
        if isinstance(value, DTensor):
            return float(value.full_tensor())
        dist.all_reduce(value)
        return float(value)

    def _pooled(self, diagnostics: Diagnostics) -> Diagnostics:
        first, *others = gathered(diagnostics.on_cpu())
        for other in others:
            first.merge(other)
        return first


def gathered(own: T) -> list[T]:
    """What each rank has, by rank, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, in host memory on rank 0; others help, and have nothing."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if dist.get_rank() == 0 else whole.new_empty(0)


def _shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, laid out as another."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:  # AdamW counts its steps
        return whole
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole.to(like.device), mesh, placements, src_data_rank=None)
