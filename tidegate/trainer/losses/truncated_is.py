"""REINFORCE with truncated importance weights.

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of the token (`level = "token"`), or the product over its row (`level = "sequence"`)
weight          min(ratio, C), a constant: the gradient of no token is zeroed, as clipping would do
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over all trained tokens of the batch

The objective is sg[min(π_θ/μ, C)] · A · log π_θ, with the weights of V-trace (Espeholt et al., IMPALA, 2018).
μ is what the engine recorded, so one ratio corrects the staleness of a token and the engine's numerics.
"""

from __future__ import annotations

from tidegate.settings.losses import TruncatedISLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import sequence_ratio, token_mean, token_ratio, truncated, weighted


def make(settings: TruncatedISLoss) -> Loss:
    """Returns the loss with these settings."""
    ratio = token_ratio if settings.level == "token" else sequence_ratio
    surrogate = centered(settings.listed_ids, weighted(truncated(settings.importance_cap)))
    return Loss(ratio, surrogate, token_mean)
