"""Ranks of a policy whose parameters, gradients and optimiser state are sharded by FSDP2.

Every rank receives the same calls, each with its own share of the rows, and reduces the sums, so that all
ranks take the same decisions. Checkpoints are gathered before they are written and equal those of a
single process, so that a run can resume with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import Microbatch, PrefixBatch, microbatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.batch.share import RankShare, split_share
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
        # Layers are gathered in the dtype of computation. The rest stays in float32, in which the gradient of
        # the head adds up over pieces of a microbatch. Gradients are summed in float32.
        precisions = [
            MixedPrecisionPolicy(param_dtype=type_, reduce_dtype=torch.float32) for type_ in (dtype, None)
        ]
        for unit in (*decoder_layers(model), root):
            precision = precisions[unit is root]
            # Reshard after the forward pass too, as a backward pass may not follow.
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
            # The loss is divided by the N of all ranks, so gradients are summed; gloo has plain sums only.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return root, device

    def split(self, whole: RankShare) -> list[RankShare]:
        return split_share(whole, self.count, self.settings.microbatch_tokens)

    def layout(self, share: RankShare, *, share_prefixes: bool) -> list[PrefixBatch]:
        """Group this rank's rows into microbatches. A pass without rows computes one token, for nothing.

        Prefixes are not shared: their backward pass would need layers that are resharded by then.
        """
        return [
            PrefixBatch([], [microbatch(share.rows, list(range(end - size, end)), {}) if size else _idle()])
            for size, end in zip(share.passes, accumulate(share.passes), strict=True)
        ]

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


def _idle() -> Microbatch:
    """Build a microbatch of one token."""
    zeros, ones = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    row = TrainingSequence(
        ids=zeros.astype(np.int32), mask=np.array([False, True]), logprobs=zeros,
        versions=zeros.astype(np.int64), temperature=ones, advantages=zeros,
    )  # fmt: skip
    return replace(microbatch([row], [0], {}), idle=True)
