"""Metrics of a batch's distance between the trained policy and the policy that sampled it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import Microbatch

CENTERED = 0.01
"""Difference of the probabilities above which a token counts in `centered_fraction`."""


class Diagnostics:
    """Off-policy metrics of one batch, accumulated by microbatch; the same for every loss.

    With r = π/μ of a token sampled from μ, where π is the policy at the start of the batch:

    - `lag_kl`: KL(μ‖π) over all trained tokens by the k3 estimator, mean of r − 1 − log r (Schulman,
      Approximating KL Divergence, 2020): unbiased and never negative.
    - `mismatch_kl`: `lag_kl` over tokens of the trainer's own version only: weights are equal, so it measures
      numerical differences. NaN without such tokens.
    - `logprob_max_error`: the largest |log π − log μ| over the same tokens. NaN without such tokens.
    - `logprob_drift`: the mean |log r| over all trained tokens.
    - `ess`: (Σr)² ÷ (n · Σr²), the effective sample size as a share of the tokens (Kish, 1965); 1 on policy.
    - `ess_rows`: the same over rows, with the product of r over each row, as a share of the rows.
    - `clip_fraction`: the share of tokens whose ratio the loss truncated, masked, or clipped so that no
      gradient is left.
    - `unlisted_mass`: the mean probability, under μ, of the ids that the engine did not list, and
      `centered_fraction`: the share of tokens at which Σ |μ − π| over the listed ids, and over all others
      together, exceeds CENTERED; only with score centering.
    - `entropy`: the mean entropy of the sampled tokens' distributions, in nats.
    - `reference_kl`: KL(π_θ‖π_ref) by k3; only with a reference model.

    |log r|, of tokens and of rows, is limited to 20 for these metrics, so that no token makes them infinite.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._sums: dict[str, Tensor] = {}
        self._max_errors: list[Tensor] = []

    @torch.no_grad()
    def add(self, logprobs_n: Tensor, entropy_n: Tensor, clipped_n: Tensor, batch: Microbatch) -> None:
        """Add one microbatch, without synchronising with the device."""
        gap_n = batch.old_logprobs(logprobs_n).double() - batch.logprobs_n.double()
        log_ratio_n = gap_n.clamp(-20.0, 20.0)
        ratio_n = log_ratio_n.exp()
        # `expm1`, as exp(x) − 1 loses its digits near 0, where most tokens are.
        k3_n = torch.expm1(log_ratio_n) - log_ratio_n
        own_n = batch.versions_n == self._version
        self._max_errors.append(torch.where(own_n, gap_n.abs(), 0.0).max())
        self._sum("tokens", torch.ones_like(ratio_n))
        self._sum("own", own_n)
        self._sum("own_k3", torch.where(own_n, k3_n, 0.0))
        self._sum("k3", k3_n)
        self._sum("drift", log_ratio_n.abs())
        self._sum("entropy", entropy_n)
        self._sum("clipped", clipped_n)
        self._sum("ratio", ratio_n)
        self._sum("ratio_squared", ratio_n.square())
        row_ratio_b = _by_row(log_ratio_n, batch).clamp(-20.0, 20.0).exp()
        self._sum("rows", torch.ones_like(row_ratio_b))
        self._sum("row_ratio", row_ratio_b)
        self._sum("row_ratio_squared", row_ratio_b.square())
        if batch.sampler_listed_nk is not None and batch.policy_listed_nk is not None:
            sampled_nk, own_nk = batch.sampler_listed_nk.exp(), batch.policy_listed_nk.exp()
            # Centering adds μ − π to the gradient by the logits, where w = 1.
            moved_nk = sampled_nk - own_nk
            moved_n = moved_nk.abs().sum(dim=1) + moved_nk.sum(dim=1).abs()
            self._sum("unlisted", (1.0 - sampled_nk.sum(dim=1)).clamp(min=0.0))
            self._sum("centered", moved_n > CENTERED)
        if batch.reference_n is not None:
            distance_n = (logprobs_n.double() - batch.reference_n.double()).clamp(-20.0, 20.0)
            self._sum("reference_k3", torch.expm1(-distance_n) + distance_n)

    def _sum(self, name: str, value_n: Tensor) -> None:
        # In float32 a sum over a batch's tokens would lose numbers as small as a KL.
        total = value_n.double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def totals(self) -> dict[str, float]:
        """Return the sums over the tokens so far, and the largest error."""
        errors = {"max_error": float(torch.stack(self._max_errors).max())} if self._max_errors else {}
        return {name: float(value) for name, value in self._sums.items()} | errors


def _by_row(value_n: Tensor, batch: Microbatch) -> Tensor:
    """Sum over each row's tokens, [b]."""
    return value_n.new_zeros(len(batch.rows)).index_add(0, batch.row_n, value_n)


def distance_metrics(totals: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch, given the totals of each rank; NaN for those without tokens."""
    names = {name for of_rank in totals for name in of_rank}
    sums = {name: sum(of_rank.get(name, 0.0) for of_rank in totals) for name in names}
    tokens, own = sums["tokens"], sums["own"]
    errors = [of_rank["max_error"] for of_rank in totals if of_rank]
    metrics = {
        "mismatch_kl": sums["own_k3"] / own if own else math.nan,
        "lag_kl": sums["k3"] / tokens,
        "logprob_drift": sums["drift"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
        "ess_rows": sums["row_ratio"] ** 2 / (sums["rows"] * sums["row_ratio_squared"]),
        # NumPy's maximum keeps NaN; Python's depends on the order.
        "logprob_max_error": float(np.max(errors)) if own else math.nan,
    }
    if "unlisted" in sums:
        metrics["unlisted_mass"] = sums["unlisted"] / tokens
        metrics["centered_fraction"] = sums["centered"] / tokens
    if "reference_k3" in sums:
        metrics["reference_kl"] = sums["reference_k3"] / tokens
    return metrics
