"""REINFORCE with masked importance weights.

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of the token (`level = "token"`), or the product over its row (`level = "sequence"`)
weight          the ratio up to C, 0 above: a token that the policy has moved too far from is not trained on
normalisation   mean over all trained tokens of the batch
"""

from __future__ import annotations

from tidegate.settings.losses import MaskedISLoss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import masked, sequence_ratio, token_mean, token_ratio, weighted


def make(settings: MaskedISLoss) -> Loss:
    """Returns the loss with these settings."""
    ratio = token_ratio if settings.level == "token" else sequence_ratio
    return Loss(ratio, weighted(masked(settings.importance_cap)), token_mean)
