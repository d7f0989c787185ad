"""Ranks of a policy whose parameters, gradients and optimiser state are sharded by FSDP2.

Every rank receives the same calls, each with its own share of the rows, and reduces the sums, so that all
ranks take the same decisions. The weights of a checkpoint are gathered before they are written and equal
those of a single process; of the optimiser's moments each rank writes its shards. A run can resume with
another number of ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.microbatch import Microbatch, PrefixBatch, microbatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.batch.share import RankShare, split_share
from tidegate.trainer.checkpoint import shards
from tidegate.trainer.checkpoint.huggingface import empty_model, read_model
from tidegate.trainer.policy.forward import decoder_layers
from tidegate.trainer.policy.head import TokenLogprobs
from tidegate.trainer.policy.ranks import Compute, Ranks

T = TypeVar("T")
READ_TIMEOUT = timedelta(hours=6)
"""Timeout of the ranks that wait while rank 0 reads files."""
SMALL = 2**16
"""Bytes of a tensor that every rank receives, such as a generator's state."""


class FSDPRanks(Ranks):
    """All ranks of the process group. Each must make the same calls in the same order.

    Args:
        settings: the `[trainer]` settings.
        store: the store of the process group.
        call: context in which rank 0 calls a method of the policy, which makes the other ranks call it.
        translate: context that translates the errors of lost connections.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        store: dist.Store,
        call: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
        translate: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(settings)
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._store, self._reads = store, 0
        self._call, self._translate = call, translate
        self._written: Callable[[], None] | None = None
        """Waits for the last checkpoint that this rank writes in the background."""

    @cached_property
    def _writers(self) -> dist.ProcessGroup:
        """A group for checkpoints alone, over gloo: they are written beside other collective operations."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group

    def call(self, method: str, *arguments: object, **options: object) -> AbstractContextManager[None]:
        return self._call(method, *arguments, **options)

    def read_model(self, path: Path) -> Any:
        model = self._on_rank_0(lambda: read_model(path))
        return empty_model(path) if model is None else model

    def agree(self, value: Callable[[], T]) -> T:
        return self.collect(value() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def outline(self, read: Callable[[], T]) -> T:
        state = self._on_rank_0(read)
        outline: T = self.agree(lambda: tree_map(_without_values, state))
        return outline if state is None else state

    def _on_rank_0(self, read: Callable[[], T]) -> T | None:
        """Return what rank 0 reads, and None on the other ranks; raises the errors of `read` on all ranks."""
        value = error = None
        self._reads += 1
        done = f"tidegate/read/{self._reads}"
        if self.rank == 0:
            try:
                value = read()
            except Exception as found:  # noqa: BLE001 - raised on all ranks
                error = found
            self._store.set(done, "")
        else:
            # Reading a large model may take longer than the timeout of collective operations.
            self._store.wait([done], READ_TIMEOUT)
        if (error := self.agree(lambda: error)) is not None:
            raise error
        return value

    def shard_model(self, model: Any, compute: Compute, dtype: torch.dtype) -> tuple[Compute, torch.device]:
        """Shard a model over the ranks of each replica, and send each its shards from rank 0, which alone has
        values.

        Each decoder layer is gathered when it is needed and resharded afterwards; the other modules
        (embedding, last norm, head) form one more unit.
        """
        kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        sizes = {"shard": self.count // self.settings.replicas}
        if self.settings.replicas > 1:
            sizes = {"replicate": self.settings.replicas, **sizes}
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        # `to_empty` gives tied weights separate memory.
        model.to_empty(device="meta").tie_weights()
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
        root.to_empty(device=device)
        model.tie_weights()
        self._fill({**dict(model.named_parameters()), **dict(model.named_buffers())}, values)
        return root, device

    @torch.no_grad()
    def _fill(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        for name, tensor in live.items():
            tensor.copy_(self.shard(values[name].detach(), tensor))

    def add_replicas(self, compute: Any, after_next: bool) -> None:
        if self.settings.replicas > 1:
            compute.set_requires_all_reduce(after_next)

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

    def gather(self, live: Mapping[str, Tensor], *, on_device: bool = False) -> dict[str, Tensor]:
        # Tied tensors are gathered once, and stay one tensor.
        distinct = {id(tensor): tensor for tensor in live.values()}
        full = {key: self._full(tensor, on_device) for key, tensor in distinct.items()}
        return {name: full[id(tensor)] for name, tensor in live.items()} if self.rank == 0 else {}

    def _full(self, tensor: Tensor, on_device: bool) -> Tensor:
        """Gather a sharded tensor into rank 0's host memory, or on its device; empty on other ranks."""
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if self.rank != 0:
            # The gathered tensor is freed at once: on rank 0 alone all of them are needed together.
            return full.new_empty(0)
        return full.detach() if on_device else full.detach().cpu()

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        if full.shape != like.shape:  # AdamW's step count, which is not sharded
            return full
        full = torch.empty_like(full, device=like.device) if full.is_meta else full.to(like.device)
        if isinstance(like, DTensor):
            return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=0)
        full = full.contiguous()
        dist.broadcast(full, 0)
        return full

    def begin_save(self, tensors: dict[str, Tensor], directory: Path) -> Callable[[], None]:
        if not tensors:
            return super().begin_save(tensors, directory)
        # Rank 0 has waited for the checkpoint before, and the thread of another rank may still be in the last
        # operation on `_writers`, on which the next one begins here.
        if self._written is not None:
            with suppress(OSError, RuntimeError):  # which rank 0 has raised
                self._written()
        # By rank 0, and complete before any rank writes.
        self.agree(lambda: shutil.rmtree(directory, ignore_errors=True))
        written = self._written = shards.begin_save(tensors, directory, self._writers)

        def wait() -> None:
            with self._translate():
                written()

        return wait

    def load_shards(self, tensors: dict[str, Tensor], directory: Path) -> None:
        shards.load(tensors, directory, self._writers)

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


def _without_values(leaf: Any) -> Any:
    """Return a large tensor's shape and type, on the meta device, and anything else as it is."""
    return leaf.to("meta") if isinstance(leaf, Tensor) and leaf.nbytes > SMALL else leaf


def _idle() -> Microbatch:
    """Build a microbatch of one token."""
    zeros, ones = np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32)
    row = TrainingSequence(
        ids=zeros.astype(np.int32), mask=np.array([False, True]), logprobs=zeros,
        versions=zeros.astype(np.int64), temperature=ones, advantages=zeros,
    )  # fmt: skip
    return replace(microbatch([row], [0], {}), idle=True)
