"""REINFORCE with masked importance weights.

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of the token (`level = "token"`), or the product over its row (`level = "sequence"`)
weight          the ratio up to C, 0 above: a token that the policy has moved too far from is not trained on
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over all trained tokens of the batch
"""

from __future__ import annotations

from tidegate.settings.losses import MaskedISLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import masked, sequence_ratio, token_mean, token_ratio, weighted


def make(settings: MaskedISLoss) -> Loss:
    """Returns the loss with these settings."""
    ratio = token_ratio if settings.level == "token" else sequence_ratio
    surrogate = centered(settings.listed_ids, weighted(masked(settings.importance_cap)))
    return Loss(ratio, surrogate, token_mean)
