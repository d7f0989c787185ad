"""Decoupled PPO (Hilton et al., Batch size-invariance for policy optimization, 2021; AReaL, 2025).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/π_old of each token; π_old is recomputed when the batch is assembled
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A), times min(π_old/μ, C)
normalisation   mean over all trained tokens of the batch

Clipping is relative to π_old, so a batch may take several optimiser steps (`trainer.minibatches`).
"""

from __future__ import annotations

from tidegate.settings.losses import DecoupledPPOLoss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import corrected, ppo_clip, proximal_ratio, token_mean, truncated


def make(settings: DecoupledPPOLoss) -> Loss:
    """Returns the loss with these settings."""
    clipping = ppo_clip(settings.clip_low, settings.clip_high)
    return Loss(proximal_ratio, corrected(truncated(settings.importance_cap), clipping), token_mean)
