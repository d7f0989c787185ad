"""Score centering by enumeration: every token of a tiny vocabulary, in float64, with autograd."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.trainer.learning_fixtures import lay, make_rows
from tidegate.settings.losses import DPPOLoss
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.built_in import dppo
from tidegate.trainer.losses.centering import TokenWeight, centered, expected_score
from tidegate.trainer.losses.loss import Surrogate
from tidegate.trainer.losses.parts import bounded, dual_clipped, masked, ppo_clip, truncated, weighted
from tidegate.trainer.policy.head import TokenLogprobs, narrowed

POSITIONS, VOCABULARY = 5, 7
LOW, HIGH = 0.7, 1.4
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "clipped": lambda ratio: ratio.clamp(LOW, HIGH),
    "truncated": lambda ratio: ratio.clamp(max=HIGH),
    "masked": lambda ratio: torch.where(ratio > HIGH, 0.0, ratio),
}
SURROGATES: dict[str, Surrogate] = {
    "unweighted": weighted(lambda ratio_n: (torch.ones_like(ratio_n), ratio_n < 0)),
    "truncated_is": weighted(truncated(HIGH)),
    "masked_is": weighted(masked(HIGH)),
    "cispo": weighted(bounded(LOW, HIGH)),
    "grpo": ppo_clip(0.2, 0.2),
    "dapo": dual_clipped(1.3, ppo_clip(0.2, 0.28)),
    "dppo": dppo(DPPOLoss(importance_cap=HIGH, threshold=0.03)).surrogate,
    "dppo_kl": dppo(DPPOLoss(importance_cap=HIGH, divergence="kl", threshold=0.01)).surrogate,
}


def log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=1)


def distributions(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The policy's logits, with gradient, and the sampler's log q, both [positions, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
    moved = logits + 0.6 * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), log_softmax(moved)


def listed(log_q: Tensor, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """log p and log q of the sampler's likeliest ids."""
    top = log_q.topk(number, dim=1)
    return log_softmax(logits).gather(1, top.indices), top.values


def of_ratio(weight: Callable[[Tensor], Tensor]) -> TokenWeight:
    return lambda log_p, log_q: weight((log_p - log_q).exp())


def exact(logits: Tensor, log_q: Tensor, weight: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ q · w(p/q) · ∇ log p over the vocabulary, by the logits."""
    log_p = log_softmax(logits)
    weights = weight((log_p - log_q).exp()).detach()
    (gradient,) = torch.autograd.grad((log_q.exp() * weights * log_p).sum(), logits)
    return gradient


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_all_ids_listed_it_is_the_exact_mean(name: str) -> None:
    logits, log_q = distributions()
    found = expected_score(*listed(log_q, logits, VOCABULARY), of_ratio(WEIGHTS[name])).sum()
    (gradient,) = torch.autograd.grad(found, logits)
    expected = exact(logits, log_q, WEIGHTS[name])
    assert expected.abs().max() > 0.02, "the case proves too little"
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("number", [1, 3])
def test_a_rest_in_proportion_to_the_policy_loses_nothing(name: str, number: int) -> None:
    """The sampler differs at the listed ids alone; the others have ρ times the policy's probability."""
    logits, log_q = distributions(1)
    at = log_q.topk(number, dim=1).indices
    log_p = log_softmax(logits).detach()
    rest = torch.ones_like(log_q).scatter(1, at, 0)
    rho = (log_q.exp() * rest).sum(1, keepdim=True) / (log_p.exp() * rest).sum(1, keepdim=True)
    log_q = torch.where(rest > 0, log_p + rho.log(), log_q)
    weight = of_ratio(WEIGHTS[name])
    found = expected_score(log_softmax(logits).gather(1, at), log_q.gather(1, at), weight)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient, exact(logits, log_q, WEIGHTS[name]), rtol=0, atol=1e-6)


def test_it_is_the_papers_formula() -> None:
    logits, log_q = distributions(2)
    log_p, log_q = listed(log_q, logits, 4)
    p, q = log_p.detach().exp(), log_q.exp()
    rho = (1 - q.sum(1, keepdim=True)) / (1 - p.sum(1, keepdim=True))
    plain = ((q - rho * p) * log_p).sum(1)
    m, alpha = torch.minimum(torch.maximum(p, LOW * q), HIGH * q), (1 + 0 * rho).clamp(LOW * rho, HIGH * rho)
    clipped = ((m - alpha * p) * log_p).sum(1)
    assert (alpha != 1).any(), "the case proves too little"
    torch.testing.assert_close(expected_score(log_p, log_q, of_ratio(WEIGHTS["none"])), plain)
    torch.testing.assert_close(expected_score(log_p, log_q, of_ratio(WEIGHTS["clipped"])), clipped)


def test_unbounded_weights_leave_nothing_to_center() -> None:
    logits, log_q = distributions()
    found = expected_score(*listed(log_q, logits, 3), of_ratio(lambda ratio: ratio))
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


def batch_of(log_q: Tensor, advantages: Tensor, number: int, logits: Tensor) -> Microbatch:
    """A microbatch whose token n was sampled from the sampler's distribution n, with these listed ids."""
    (batch,) = lay(make_rows(2, shortest=20), 4096)
    policy, sampler = listed(log_q, logits, number)
    return replace(batch, advantages_n=advantages, policy_listed_nk=policy, sampler_listed_nk=sampler)


def mean_gradient(surrogate: Surrogate, number: int, advantage: Tensor) -> Tensor:
    """The mean gradient by the logits, over tokens drawn from the sampler."""
    logits, log_q = distributions()
    total = torch.zeros_like(logits)
    for token in range(VOCABULARY):
        batch = replace(batch_of(log_q, advantage, number, logits), logprobs_n=log_q[:, token])
        log_p = log_softmax(logits)[:, token]
        objective, _ = surrogate(log_p - log_q[:, token], log_p, batch)
        (gradient,) = torch.autograd.grad(objective.sum(), logits, retain_graph=True)
        total += log_q[:, token : token + 1].exp() * gradient
    return total


@pytest.mark.parametrize("name", SURROGATES)
def test_the_mean_update_of_an_advantage_that_all_tokens_share_is_zero(name: str) -> None:
    """It is not without centering, and smaller with some ids listed."""
    advantage = torch.tensor([1.0, -1.0, 2.0, -0.5, -2.0], dtype=torch.float64)
    surrogate = SURROGATES[name]
    without = mean_gradient(centered(0, surrogate), 1, advantage)
    some = mean_gradient(centered(5, surrogate), 5, advantage)
    every = mean_gradient(centered(VOCABULARY, surrogate), VOCABULARY, advantage)
    assert without.abs().max() > 0.02
    assert some.norm() < 0.5 * without.norm()
    assert every.abs().max() < 1e-6


def test_ids_that_the_sampler_excluded_stay_finite() -> None:
    logits, log_q = distributions()
    log_q = log_softmax(log_q.index_fill(1, torch.tensor([2, 4]), -torch.inf))
    for surrogate in SURROGATES.values():
        for sign in (1.0, -1.0):
            advantages = torch.full((POSITIONS,), sign, dtype=torch.float64)
            batch = batch_of(log_q, advantages, VOCABULARY, logits)
            log_p = log_softmax(logits)[:, 0]
            objective, _ = centered(VOCABULARY, surrogate)(
                log_p - log_q[:, 0], log_p, replace(batch, logprobs_n=log_q[:, 0])
            )
            (gradient,) = torch.autograd.grad(objective.sum(), logits, retain_graph=True)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("number", [2, 4, VOCABULARY])
@pytest.mark.parametrize("name", SURROGATES)
def test_centering_over_kept_ids_leaves_no_mean_update(name: str, number: int) -> None:
    """Sampler and policy are renormalised over four kept ids; with these listed, the mean is exactly 0."""
    logits, log_q = distributions(3)
    kept = log_q.topk(4, dim=1).indices
    excluded = torch.ones_like(log_q, dtype=torch.bool).scatter(1, kept, False)
    log_q = log_softmax(log_q.masked_fill(excluded, -torch.inf)).clamp(min=-9999.0)
    ids = log_q.topk(number, dim=1).indices
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5, -2.0], dtype=torch.float64)
    (batch,) = lay(make_rows(2, shortest=20), 4096)
    sampler = log_q.gather(1, ids)
    means = []
    for listed in (0, number):
        total = torch.zeros_like(logits)
        for tokens in kept.T[:, :, None]:
            log_p, own_n = log_softmax(logits), log_q.gather(1, tokens)[:, 0]
            every = torch.cat([log_p.gather(1, ids), log_p.gather(1, kept)], dim=1)
            scored = TokenLogprobs(log_p.gather(1, tokens)[:, 0], own_n, every)
            log_p_n, _, policy = narrowed(scored, kept, sampler)
            drawn = replace(
                batch, advantages_n=advantages, logprobs_n=own_n, policy_listed_nk=policy,
                sampler_listed_nk=sampler,
            )  # fmt: skip
            objective, _ = centered(listed, SURROGATES[name])(log_p_n - own_n, log_p_n, drawn)
            total += torch.autograd.grad((own_n.exp() * objective).sum(), logits)[0]
        means.append(total)
    without, with_centering = means
    assert without.abs().max() > 0.02, "the case proves too little"
    assert with_centering.norm() < (1e-6 if number >= 4 else 0.7 * without.norm())
