"""Score centering (Marek and Ryabinin, Score Centering Stabilizes Off-policy RL, arXiv 2609.20807, 2026).

A loss has the gradient w · A · ∇ log p(y) at a sampled token y, with a weight w such as min(p/q, cap). Tokens
are sampled from the engine's q, and unless q = p or w = p/q, the mean of w · ∇ log p under q is not 0: an
advantage that all tokens share moves the policy towards or away from q. Centering subtracts that mean:

listed ids      H, the k likeliest ids of the sampler, with its probabilities q
rest            ρ = (1 − Σ_H q) ÷ max(1 − Σ_H p, 1e-6); ids that are not listed have q = ρ · p
expectation     C = Σ_H sg[m − α · p] · log p, with m = q · w(p/q) and α = ρ · w(1/ρ)
objective       A · w · log p(y) − A · C, to be maximised

With w = 1: m = q and α = ρ; with w = clip(r, lo, hi): m = clip(p, lo·q, hi·q), α = clip(1, lo·ρ, hi·ρ). The
rest is not summed: Σ p · ∇ log p = 0 over the vocabulary, so α times the listed part stands for it. If all
ids are listed, the gradient of C is the exact mean.

Axes in names: n trained tokens, k listed ids, m the listed ids and the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.loss import Surrogate
from tidegate.trainer.losses.parts import SMALLEST_REST

LEAST_LOGPROB = -60.0
"""Smallest log q that is computed with, so that ratios stay finite for ids that the sampler excluded."""
SMALLEST_SAMPLED_REST = 1e-9
"""Smallest 1 − Σ_H q: rounding may make it negative."""

TokenWeight = Callable[[Tensor, Tensor], Tensor]
"""(log p, log q), both [n, m] → w, constant, [n, m]."""


def expected_score(policy_nk: Tensor, sampler_nk: Tensor, weight: TokenWeight) -> Tensor:
    """C of each token, [n]: its gradient is the mean of w · ∇ log p under the sampler.

    Args:
        policy_nk: log p of the listed ids, with gradient.
        sampler_nk: log q of the listed ids, each id once.
        weight: the loss's weight. For the rest it gets the rest's ratio, at a probability that no id in it
            exceeds.
    """
    log_p_nk, log_q_nk = policy_nk.detach(), sampler_nk.clamp(min=LEAST_LOGPROB)
    p_rest_n = (1.0 - log_p_nk.exp().sum(dim=1, keepdim=True)).clamp(min=SMALLEST_REST).log()
    q_rest_n = (1.0 - log_q_nk.exp().sum(dim=1, keepdim=True)).clamp(min=SMALLEST_SAMPLED_REST).log()
    log_rho_n = q_rest_n - p_rest_n
    least_n = torch.minimum(log_q_nk.amin(dim=1, keepdim=True), q_rest_n)
    log_q_nm = torch.cat([log_q_nk, least_n], dim=1)
    weight_nm = weight(torch.cat([log_p_nk, least_n - log_rho_n], dim=1), log_q_nm)
    weighted_nk = log_q_nk.exp() * weight_nm[:, :-1]
    alpha_n = log_rho_n.exp() * weight_nm[:, -1:]
    return ((weighted_nk - alpha_n * log_p_nk.exp()) * policy_nk).sum(dim=1)


def centered(listed: int, surrogate: Surrogate) -> Surrogate:
    """surrogate − A·C, with the weight that the surrogate's own gradient has. 0 listed ids: no centering.

    The surrogate must treat tokens one by one, with the ratio π/μ of the token.
    """
    if not listed:
        return surrogate

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        assert batch.policy_listed_nk is not None
        assert batch.sampler_listed_nk is not None, "rows have no likeliest ids of the sampler"

        def slope(log_p_nm: Tensor, log_q_nm: Tensor) -> Tensor:
            return _slope(surrogate, log_p_nm, log_q_nm, batch)

        objective_n, clipped_n = surrogate(log_ratio_n, logprobs_n, batch)
        return objective_n - expected_score(batch.policy_listed_nk, batch.sampler_listed_nk, slope), clipped_n

    return objective


def _slope(surrogate: Surrogate, log_p_nm: Tensor, log_q_nm: Tensor, batch: Microbatch) -> Tensor:
    """A · w, [n, m]: the derivative of the surrogate by log p, had each of these ids been sampled."""
    advantages_n = batch.advantages_n.repeat_interleave(log_p_nm.shape[1])
    sampled = replace(batch, logprobs_n=log_q_nm.flatten(), advantages_n=advantages_n)
    with torch.enable_grad():
        logprobs_n = log_p_nm.flatten().requires_grad_()
        objective_n, _ = surrogate(logprobs_n - sampled.logprobs_n, logprobs_n, sampled)
        (slope_n,) = torch.autograd.grad(objective_n.sum(), logprobs_n)
    return slope_n.view_as(log_p_nm)
