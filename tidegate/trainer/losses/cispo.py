"""CISPO (MiniMax-M1, 2025): REINFORCE with clipped importance weights.

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
weight          clip(ratio, 1 − low, 1 + high), a constant: the gradient of no token is zeroed
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over all trained tokens of the batch
"""

from __future__ import annotations

from tidegate.settings.losses import CISPOLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import bounded, token_mean, token_ratio, weighted


def make(settings: CISPOLoss) -> Loss:
    """Returns the loss with these settings."""
    weight = bounded(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return Loss(token_ratio, centered(settings.listed_ids, weighted(weight)), token_mean)
