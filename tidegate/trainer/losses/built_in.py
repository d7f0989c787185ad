"""The built-in losses, a function for each by its name in `trainer.loss.name`; `make_loss` makes the loss of
the settings.

The docstring of a function gives the parts of its loss. Unless it gives another, the advantage is the reward
less the group's mean, ÷ the group's standard deviation. Two parts are added by settings:

mask            tokens with A < 0 in rows whose mean log μ/π_θ exceeds `sequence_mask`, if that is set
                (DeepSeek-V3.2, arXiv 2512.02556, 2025)
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.errors import ConfigError
from tidegate.loading import construct, load_object
from tidegate.settings.losses import (
    CISPOLoss,
    CustomLoss,
    DAPOLoss,
    DecoupledPPOLoss,
    DPPOLoss,
    DrGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    MaskedISLoss,
    NLLLoss,
    TruncatedISLoss,
)
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss, Penalty
from tidegate.trainer.losses.parts import (
    added,
    bounded,
    corrected,
    dual_clipped,
    masked,
    ppo_clip,
    proximal_ratio,
    reference_penalty,
    row_mean,
    sequence_masked,
    sequence_ratio,
    sequence_sum,
    teacher_penalty,
    token_mean,
    token_ratio,
    trajectory_mean,
    truncated,
    weighted,
)

THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Default of `trainer.loss.threshold` for each divergence of `dppo`."""


def make_loss(settings: TrainerSettings) -> Loss:
    """Returns the loss, with the penalties for the distance to the reference model and the teacher, if set.

    Raises ConfigError if a function of the user's own cannot be loaded, or returns no `Loss`.
    """
    loss = BY_NAME[settings.loss.name](settings.loss)
    penalties: list[Penalty] = []
    if settings.kl_coef:
        penalties.append(reference_penalty(settings.kl_estimator, settings.kl_coef))
    if settings.teacher.enabled:
        penalties.append(teacher_penalty(settings.teacher.form, settings.teacher.weight))
    return replace(loss, penalty=functools.reduce(added, penalties)) if penalties else loss


def grpo(settings: GRPOLoss) -> Loss:
    """GRPO (Shao et al., DeepSeekMath, 2024), with mask and centering.

    ratio           π_θ/μ of each token
    clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
    normalisation   mean over a trajectory's tokens, then over trajectories
    """
    clipping = centered(settings.listed_ids, ppo_clip(settings.clip_low, settings.clip_high))
    return Loss(token_ratio, sequence_masked(settings.sequence_mask, clipping), trajectory_mean)


def dr_grpo(settings: DrGRPOLoss) -> Loss:
    """Dr. GRPO (Liu et al., Understanding R1-Zero-Like Training, 2025), with mask and centering.

    advantage       reward less the group's mean, not divided
    ratio           π_θ/μ of each token
    clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
    normalisation   sum over tokens ÷ (trajectories · `sequence_length`): tokens of long answers weigh no less
    """
    clipping = centered(settings.listed_ids, ppo_clip(settings.clip_low, settings.clip_high))
    clipping = sequence_masked(settings.sequence_mask, clipping)
    return Loss(token_ratio, clipping, sequence_sum(settings.sequence_length))


def dapo(settings: DAPOLoss) -> Loss:
    """DAPO (Yu et al., 2025), with mask and centering.

    ratio           π_θ/μ of each token
    clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) with high > low (clip-higher, §3.1);
                    at least `dual_clip` · A where A < 0 (Ye et al., arXiv 1912.09729, 2020)
    normalisation   mean over all trained tokens of the batch (§3.3)

    Its other parts are settings of the trainer: `dynamic_sampling`, `truncated_episodes`, `length_penalty`.
    """
    clipping = dual_clipped(settings.dual_clip, ppo_clip(settings.clip_low, settings.clip_high))
    clipping = centered(settings.listed_ids, clipping)
    return Loss(token_ratio, sequence_masked(settings.sequence_mask, clipping), token_mean)


def gspo(settings: GSPOLoss) -> Loss:
    """GSPO-token (Zheng et al., Group Sequence Policy Optimization, 2025, §4.3).

    ratio           (π_θ(y)/μ(y))^(1/|y|) of the row's trained tokens y, with the gradient of the token's own
    clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
    normalisation   mean over a trajectory's tokens, then over trajectories
    """
    return Loss(_gspo_ratio, ppo_clip(settings.clip_low, settings.clip_high), trajectory_mean)


def _gspo_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """Log of GSPO-token's ratio, sg[s] · π_θ ÷ sg[π_θ] with s = (π_θ(y)/μ(y))^(1/|y|) over the row's
    trained tokens.

    Every token has the value of the sequence's ratio and its own gradient, so that it is weighted by its own
    advantage. If all tokens of a row have the same advantage, the gradient equals GSPO's.
    """
    return row_mean(token_ratio(logprobs_n, batch).detach(), batch) + logprobs_n - logprobs_n.detach()


def cispo(settings: CISPOLoss) -> Loss:
    """CISPO (MiniMax-M1, 2025): REINFORCE with clipped importance weights, with centering.

    ratio           π_θ/μ of each token
    weight          clip(ratio, 1 − low, 1 + high), a constant: the gradient of no token is zeroed
    normalisation   mean over all trained tokens of the batch
    """
    weight = bounded(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return Loss(token_ratio, centered(settings.listed_ids, weighted(weight)), token_mean)


def dppo(settings: DPPOLoss) -> Loss:
    """DPPO (Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879, 2026),
    with centering.

    ratio           π_θ/μ of each token
    divergence      D of π_θ from μ, both reduced to two outcomes, the sampled token or another one:
                    total variation |π_θ − μ|, or KL μ·log(μ/π_θ) + (1 − μ)·log((1 − μ)/(1 − π_θ))
    weight          min(ratio, C), a constant; 0 if D > δ and the gradient would increase D
                    (A > 0 and π_θ > μ, or A < 0 and π_θ < μ)
    normalisation   mean over all trained tokens of the batch

    The ratio of a rare token may be far from 1 although the policy has hardly changed, and that of a frequent
    token near 1 although it has changed much; the divergence measures the change itself.
    """
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


def decoupled_ppo(settings: DecoupledPPOLoss) -> Loss:
    """Decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, 2021; AReaL, 2025).

    ratio           π_θ/π_old of each token; π_old is recomputed when the batch is assembled
    clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A), times min(π_old/μ, C)
    normalisation   mean over all trained tokens of the batch

    Clipping is relative to π_old, so a batch may take several optimiser steps (`trainer.minibatches`).
    """
    clipping = ppo_clip(settings.clip_low, settings.clip_high)
    return Loss(proximal_ratio, corrected(truncated(settings.importance_cap), clipping), token_mean)


def masked_is(settings: MaskedISLoss) -> Loss:
    """REINFORCE with masked importance weights, with centering.

    ratio           π_θ/μ of the token (`level = "token"`), or the product over its row (`level = "sequence"`)
    weight          the ratio up to C, 0 above: a token that the policy has moved too far from is not trained
                    on
    normalisation   mean over all trained tokens of the batch
    """
    ratio = token_ratio if settings.level == "token" else sequence_ratio
    surrogate = centered(settings.listed_ids, weighted(masked(settings.importance_cap)))
    return Loss(ratio, surrogate, token_mean)


def truncated_is(settings: TruncatedISLoss) -> Loss:
    """REINFORCE with truncated importance weights, with centering.

    ratio           π_θ/μ of the token (`level = "token"`), or the product over its row (`level = "sequence"`)
    weight          min(ratio, C), a constant: the gradient of no token is zeroed, as clipping would do
    normalisation   mean over all trained tokens of the batch

    The objective is sg[min(π_θ/μ, C)] · A · log π_θ, with the weights of V-trace (Espeholt et al., IMPALA,
    2018). μ is what the engine recorded, so one ratio corrects the staleness of a token and the engine's
    numerics.
    """
    ratio = token_ratio if settings.level == "token" else sequence_ratio
    surrogate = centered(settings.listed_ids, weighted(truncated(settings.importance_cap)))
    return Loss(ratio, surrogate, token_mean)


def nll(settings: NLLLoss) -> Loss:
    """Negative log likelihood, the loss of supervised fine-tuning (`tidegate sft`).

    advantage       1
    ratio           none: it does not matter which policy sampled the token
    normalisation   mean over all trained tokens of the batch
    """

    def log_likelihood(_: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        return logprobs_n, torch.zeros_like(logprobs_n, dtype=torch.bool)

    return Loss(lambda logprobs_n, batch: torch.zeros_like(logprobs_n), log_likelihood, token_mean)


def custom(settings: CustomLoss) -> Loss:
    """A loss of the user's own: `trainer.loss.use = "file.py:function"`, called with `trainer.loss.options`.

    The function returns a `Loss`, of parts of its own or of those in `parts`.
    """
    loss = construct(load_object(settings.use, {}, "loss"), settings.options, "loss")
    if not isinstance(loss, Loss):
        raise ConfigError(
            f"trainer.loss.use = {settings.use!r} returned {type(loss).__name__}, not a "
            "tidegate.trainer.losses.loss.Loss"
        )
    return loss


BY_NAME: dict[str, Callable[[Any], Loss]] = {
    make.__name__: make
    for make in (
        grpo, dr_grpo, dapo, gspo, cispo, dppo, decoupled_ppo, masked_is, truncated_is, nll, custom,
    )
}  # fmt: skip
