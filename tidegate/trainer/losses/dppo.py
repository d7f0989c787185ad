"""DPPO (Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879, 2026).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
divergence      D of π_θ from μ, both reduced to two outcomes, the sampled token or another one:
                total variation |π_θ − μ|, or KL μ·log(μ/π_θ) + (1 − μ)·log((1 − μ)/(1 − π_θ))
weight          min(ratio, C), a constant; 0 if D > δ and the gradient would increase D
                (A > 0 and π_θ > μ, or A < 0 and π_θ < μ)
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over all trained tokens of the batch

The ratio of a rare token may be far from 1 although the policy has hardly changed, and that of a frequent
token near 1 although it has changed much; the divergence measures the change itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.settings.losses import DPPOLoss
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import token_mean, token_ratio

THRESHOLDS = {"tv": 0.15, "kl": 0.05}


def make(settings: DPPOLoss) -> Loss:
    """Returns the loss with these settings."""
    divergence = total_variation if settings.divergence == "tv" else kl_divergence
    threshold = THRESHOLDS[settings.divergence] if settings.threshold is None else settings.threshold

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        log_ratio_n = log_ratio_n.detach()
        outward_n = batch.advantages_n * log_ratio_n > 0
        masked_n = outward_n & (divergence(logprobs_n.detach(), batch.logprobs_n) > threshold)
        ratio_n = log_ratio_n.exp()
        weight_n = ratio_n.clamp(max=settings.importance_cap).masked_fill(masked_n, 0.0)
        return weight_n * batch.advantages_n * logprobs_n, masked_n | (ratio_n > settings.importance_cap)

    return Loss(token_ratio, centered(settings.listed_ids, objective), token_mean)


def total_variation(log_pi_n: Tensor, log_mu_n: Tensor) -> Tensor:
    """|π − μ| of each token."""
    return (log_pi_n.exp() - log_mu_n.exp()).abs()


def kl_divergence(log_pi_n: Tensor, log_mu_n: Tensor) -> Tensor:
    """KL(μ‖π) of "this token" against "another token", for each token; 0 · log 0 is 0."""
    # 1 − exp(x) would lose its digits for probabilities near 1.
    pi_other_n, mu_other_n = -torch.expm1(log_pi_n), -torch.expm1(log_mu_n)
    other_n = torch.xlogy(mu_other_n, mu_other_n) - torch.xlogy(mu_other_n, pi_other_n)
    return log_mu_n.exp() * (log_mu_n - log_pi_n) + other_n
