"""What a batch tells about the distance between the policy and the samples it is trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.trainer.policy.microbatch import Microbatch


class Diagnostics:
    """The figures of one batch, summed by microbatch; the same for every loss.

    With r = π/μ of one token sampled from μ, π being the policy at the cut:

    - `lag_kl`: KL(μ‖π) over all trained tokens by the k3 estimator, mean of r − 1 − log r (Schulman,
      Approximating KL Divergence, 2020): unbiased, and never negative.
    - `mismatch_kl`: the same over tokens of the trainer's own version, whose weights are equal: what is
      left is numerics. None such: NaN.
    - `logprob_max_error`: the largest |log π − log μ| over those same tokens. None such: NaN.
    - `ess`: (Σr)² ÷ (n · Σr²), the effective sample size as a share of the tokens (Kish, 1965); 1 on
      policy.
    - `clip_fraction`: the share of tokens whose ratio the loss cut: truncated, masked, or clipped so that
      no gradient is left.
    - `entropy`: the mean entropy of the sampled tokens' distributions, in nats.
    - `reference_kl`: KL(π_θ‖π_ref) by k3, where there is a reference model.

    |log r| is cut at 20 for these figures alone, so that a token cannot turn them into infinities.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._sums: dict[str, Tensor] = {}
        self._worst: list[Tensor] = []

    @torch.no_grad()
    def add(self, logprobs_n: Tensor, entropy_n: Tensor, cut_n: Tensor, batch: Microbatch) -> None:
        """Enter one microbatch; nothing is read back from the device here."""
        gap_n = batch.at_cut(logprobs_n).double() - batch.logprobs_n.double()
        log_ratio_n = gap_n.clamp(-20.0, 20.0)
        ratio_n = log_ratio_n.exp()
        k3_n = torch.expm1(log_ratio_n) - log_ratio_n
        own_n = batch.versions_n == self._version
        self._worst.append(torch.where(own_n, gap_n.abs(), 0.0).max())
        self._sum("tokens", torch.ones_like(ratio_n))
        self._sum("own", own_n)
        self._sum("own_k3", torch.where(own_n, k3_n, 0.0))
        self._sum("k3", k3_n)
        self._sum("entropy", entropy_n)
        self._sum("cut", cut_n)
        self._sum("ratio", ratio_n)
        self._sum("ratio_squared", ratio_n.square())
        if batch.reference_n is not None:
            distance_n = (logprobs_n.double() - batch.reference_n.double()).clamp(-20.0, 20.0)
            self._sum("reference_k3", torch.expm1(-distance_n) + distance_n)

    def _sum(self, name: str, value_n: Tensor) -> None:
        total = value_n.double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def on_cpu(self) -> Diagnostics:
        """The same in host memory."""
        found = Diagnostics(self._version)
        found._sums = {name: value.cpu() for name, value in self._sums.items()}
        found._worst = [value.cpu() for value in self._worst]
        return found

    def merge(self, other: Diagnostics) -> None:
        """Enter all that was entered there."""
        for name, value in other._sums.items():
            self._sum(name, value)
        self._worst += other._worst

    def metrics(self) -> dict[str, float]:
        """The figures over everything entered; NaN where a figure has no tokens."""
        sums = {name: float(value) for name, value in self._sums.items()}
        tokens, own = sums["tokens"], sums["own"]
        found = {
            "mismatch_kl": sums["own_k3"] / own if own else float("nan"),
            "lag_kl": sums["k3"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["cut"] / tokens,
            "ess": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
            "logprob_max_error": float(torch.stack(self._worst).max()) if own else float("nan"),
        }
        if "reference_k3" in sums:
            found["reference_kl"] = sums["reference_k3"] / tokens
        return found
