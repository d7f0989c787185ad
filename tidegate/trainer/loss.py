"""Losses as compositions: a ratio, what is made of it, and what the sum is divided by.

The default, for one optimiser step a batch, is −Σ sg[min(π_θ/μ, C)] · A · log π_θ ÷ N: REINFORCE with
the truncated importance weights of V-trace (Espeholt et al., IMPALA, 2018), which MiniMax-M1 (2025)
calls CISPO. μ is the probability that the engine recorded, so one ratio corrects both the age of a token
and the engine's numerics. Unlike a clipped surrogate it never zeroes the gradient of a token.

Axes in names: n trained tokens, v vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.trainer.batch import Row
from tidegate.trainer.layout import Microbatch

Ratio = Callable[[Tensor, Microbatch], Tensor]
"""(log π_n, microbatch) → log of the importance ratio of each token, [n]."""
Surrogate = Callable[[Tensor, Tensor, Microbatch], Tensor]
"""(log ratio_n, log π_n, microbatch) → what is maximised, by token, [n]."""
Aggregation = Callable[[Sequence[Row]], float]
"""All rows of the batch → N, what the weighted sum over its tokens is divided by."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by its parts. It is summed over microbatches, so N is asked for once, of the whole batch."""

    ratio: Ratio
    surrogate: Surrogate
    aggregation: Aggregation

    def __call__(self, logprobs_n: Tensor, batch: Microbatch, denominator: float) -> Tensor:
        """This microbatch's share of the loss: −Σ weight · surrogate ÷ N, a scalar."""
        objective_n = self.surrogate(self.ratio(logprobs_n, batch), logprobs_n, batch)
        return -(batch.weights_n * objective_n).sum() / denominator


def token_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """log π_θ − log μ of each token by itself."""
    return logprobs_n - batch.logprobs_n


def truncated(cap: float) -> Surrogate:
    """sg[min(ratio, cap)] · A · log π: the weight is a constant, the gradient is REINFORCE's."""

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> Tensor:
        weight_n = log_ratio_n.detach().exp().clamp(max=cap)
        return weight_n * batch.advantages_n * logprobs_n

    return objective


def weighted_mean(rows: Sequence[Row]) -> float:
    """N = Σ of the trained tokens' weights: their number under token mean, the trajectories' under
    sequence mean."""
    return sum(row.weight * row.trained for row in rows)


LOSSES: dict[str, Callable[[TrainerSettings], Loss]] = {
    "truncated": lambda settings: Loss(token_ratio, truncated(settings.importance_cap), weighted_mean),
}


def token_logprobs(logits_nv: Tensor, targets_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """log π of the targets and the entropy of their distributions, (float32 [n], float32 [n] detached).

    The distribution is softmax(logits ÷ temperature), the one that the engine samples from and reports.
    """
    logprobs_nv = torch.log_softmax(logits_nv.float() / temperatures_n[:, None], dim=-1)
    with torch.no_grad():
        entropy_n = torch.special.entr(logprobs_nv.exp()).sum(dim=-1)
    return logprobs_nv.gather(1, targets_n[:, None]).squeeze(1), entropy_n


class Diagnostics:
    """What a batch tells about the distance between the policy and the samples; summed by microbatch.

    With r = π/μ of one token sampled from μ:

    - `lag_kl`: KL(μ‖π) over all trained tokens by the k3 estimator, mean of r − 1 − log r (Schulman,
      Approximating KL Divergence, 2020): unbiased, and never negative.
    - `mismatch_kl`: the same over tokens of the trainer's own version, whose weights are equal: what is
      left is numerics. None such: NaN.
    - `logprob_max_error`: the largest |log π − log μ| over those same tokens. None such: NaN.
    - `clip_fraction`: the share of tokens with r > C.
    - `ess`: (Σr)² ÷ (n · Σr²), the effective sample size as a share of the tokens (Kish, 1965); 1 on
      policy.
    - `entropy`: the mean entropy of the sampled tokens' distributions, in nats.

    |log r| is cut at 20 for these figures alone, so that a token cannot turn them into infinities.
    """

    def __init__(self, version: int, cap: float) -> None:
        self._version = version
        self._cap = cap
        self._sums: dict[str, Tensor] = {}
        self._worst: list[Tensor] = []

    @torch.no_grad()
    def add(self, logprobs_n: Tensor, entropy_n: Tensor, batch: Microbatch) -> None:
        """Enter one microbatch; nothing is read back from the device here."""
        gap_n = logprobs_n.double() - batch.logprobs_n.double()
        log_ratio_n = gap_n.clamp(-20.0, 20.0)
        ratio_n = log_ratio_n.exp()
        k3_n = torch.expm1(log_ratio_n) - log_ratio_n
        own_n = batch.versions_n == self._version
        self._worst.append(torch.where(own_n, gap_n.abs(), 0.0).max())
        for name, value_n in (
            ("tokens", torch.ones_like(ratio_n)),
            ("own", own_n.double()),
            ("own_k3", torch.where(own_n, k3_n, 0.0)),
            ("k3", k3_n),
            ("entropy", entropy_n.double()),
            ("clipped", (ratio_n > self._cap).double()),
            ("ratio", ratio_n),
            ("ratio_squared", ratio_n.square()),
        ):
            total = value_n.sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def metrics(self) -> dict[str, float]:
        """The figures over everything entered; NaN where a figure has no tokens."""
        sums = {name: float(value) for name, value in self._sums.items()}
        tokens, own = sums["tokens"], sums["own"]
        return {
            "mismatch_kl": sums["own_k3"] / own if own else float("nan"),
            "lag_kl": sums["k3"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
            "logprob_max_error": float(torch.stack(self._worst).max()) if own else float("nan"),
        }
