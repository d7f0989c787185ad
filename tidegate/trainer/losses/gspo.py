"""GSPO-token (Zheng et al., Group Sequence Policy Optimization, 2025, §4.3).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           (π_θ(y)/μ(y))^(1/|y|) of the row's trained tokens y, with the gradient of the token's own
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
normalisation   mean over a trajectory's tokens, then over trajectories
"""

from __future__ import annotations

from tidegate.settings.losses import GSPOLoss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import gspo_token_ratio, ppo_clip, trajectory_mean


def make(settings: GSPOLoss) -> Loss:
    """Returns the loss with these settings."""
    return Loss(gspo_token_ratio, ppo_clip(settings.clip_low, settings.clip_high), trajectory_mean)
