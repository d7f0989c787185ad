"""The gradient of one optimiser step: forward pass, loss and backward pass of each microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import ForwardPass, Microbatch, PrefixBatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.policy.diagnostics import Diagnostics
from tidegate.trainer.policy.forward import Forward, Prefix
from tidegate.trainer.policy.ranks import Ranks


@dataclass(slots=True)
class GradientStep:
    """The gradient of one optimiser step: summed over microbatches, then divided by the loss's N."""

    forward: Forward
    objective: Loss
    rows: list[TrainingSequence] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    passes: list[ForwardPass] = field(default_factory=list)
    denominator: float = 0.0
    loss: float = math.nan
    grad_norm: float = math.nan
    done: bool = False
    """Whether loss and norm are known."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def accumulate(self, rows: Sequence[TrainingSequence], diagnostics: Diagnostics) -> None:
        """Add N times the gradient of the rows' loss to the parameters' gradients."""
        weights, denominator = self.objective.aggregation(rows)
        weighted = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
        batches, passes = self.forward.layout(weighted)
        self.losses += [self._backward_prefix_batch(batch, diagnostics) for batch in batches]
        self.passes += passes
        self.rows += rows
        self.denominator += denominator

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
        batch = replace(batch, policy_top_nk=top_nk)
        loss, clipped_n = self.objective(logprobs_n, batch, 1.0)
        loss.backward()
        if not batch.idle:
            diagnostics.add(logprobs_n, entropy_n, clipped_n, batch)
        return loss.detach()

    def finish(self, model: Any, max_norm: float, ranks: Ranks) -> None:
        """Divide the gradients by N and clip them; sets `loss` and `grad_norm`."""
        self.done = True
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, self.denominator)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self.loss = ranks.sum(torch.stack(self.losses).sum()) / self.denominator
        self.grad_norm = ranks.sum(norm)

    def non_finite_groups(self) -> list[str]:
        """Return the groups of rows with a non-finite loss; all groups if no single row explains it."""
        bad = {
            row.group_id
            for row, logprobs in zip(self.rows, self.forward.logprobs(self.rows), strict=True)
            if not (np.isfinite(row.advantages).all() and np.isfinite(logprobs).all())
            or np.isnan(row.logprobs[row.mask]).any()
        }
        return sorted(bad or {row.group_id for row in self.rows})
