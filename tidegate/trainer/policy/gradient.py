"""The gradient of one optimiser step: forward pass, loss and backward pass of each microbatch."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import ForwardPass, Microbatch, PrefixBatch
from tidegate.trainer.batch.share import RankShare
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.forward import Forward, Prefix
from tidegate.trainer.policy.ranks import Ranks


@dataclass(slots=True)
class GradientStep:
    """The gradient of one optimiser step: summed over microbatches, then divided by the loss's N."""

    forward: Forward
    objective: Loss
    shares: list[RankShare] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    passes: list[ForwardPass] = field(default_factory=list)
    """Those of this rank."""
    loss: float = math.nan
    grad_norm: float = math.nan
    done: bool = False
    """Whether loss and norm are known."""
    _: KW_ONLY
    taken: bool = False
    """Whether the optimiser has changed the weights by it."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def groups(self) -> set[str]:
        """Ids of the groups of all ranks' rows."""
        return {group for share in self.shares for group in share.groups}

    def accumulate(self, share: RankShare, diagnostics: Diagnostics) -> None:
        """Add N times the gradient of the loss of this rank's rows to the parameters' gradients."""
        self.shares.append(share)
        batches = self.forward.layout(share)
        for batch in batches:
            self.forward.add_replicas(batch is batches[-1])
            self.losses.append(self._backward_prefix_batch(batch, diagnostics))
            self.passes += batch.passes

    def _backward_prefix_batch(self, batch: PrefixBatch, diagnostics: Diagnostics) -> Tensor:
        """Returns the batch's share of the loss, times N."""
        prefix = self.forward.prefix(batch)
        losses = [self._backward(microbatch, prefix, diagnostics) for microbatch in batch.microbatches]
        if prefix is not None:
            prefix.backward()
        return torch.stack(losses).sum()

    def _backward(self, batch: Microbatch, prefix: Prefix | None, diagnostics: Diagnostics) -> Tensor:
        batch = batch.to(self.forward.device)
        logprobs_n, entropy_n, top_nk = self.forward(batch, prefix)
        if batch.idle:
            # Not left out: the other ranks' reductions wait for a backward pass of this rank.
            loss = 0.0 * logprobs_n.sum()
        else:
            batch = batch.with_others(top_nk)
            # N is 1 here: a streamed batch knows its own only at the end, when `finish` divides by it.
            loss, clipped_n = self.objective(logprobs_n, batch, 1.0)
            diagnostics.add(logprobs_n, entropy_n, clipped_n, batch)
        loss.backward()
        return loss.detach()

    def finish(self, model: Any, max_norm: float, ranks: Ranks) -> None:
        """Divide the gradients by N and clip them; sets `loss` and `grad_norm`."""
        self.done = True
        denominator = sum(share.denominator for share in self.shares)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, denominator)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self.loss = ranks.sum(torch.stack(self.losses).sum()) / denominator
        self.grad_norm = ranks.sum(norm)

    def non_finite_groups(self, ranks: Ranks) -> list[str]:
        """Return the groups of rows with a non-finite loss; all groups if no single row explains it."""
        bad = {
            row.group_id
            for share in self.shares
            for row, logprobs in zip(share.rows, self.forward.logprobs(share), strict=True)
            if not (np.isfinite(row.advantages).all() and np.isfinite(logprobs).all())
            or np.isnan(row.logprobs[row.mask]).any()
        }
        return sorted(set[str]().union(*ranks.collect(bad)) or self.groups)
