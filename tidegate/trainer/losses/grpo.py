"""GRPO (Shao et al., DeepSeekMath, 2024).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
mask            tokens with A < 0 in rows whose mean log μ/π_θ exceeds `sequence_mask`, if that is set
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over a trajectory's tokens, then over trajectories
"""

from __future__ import annotations

from tidegate.settings.losses import GRPOLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, sequence_masked, token_ratio, trajectory_mean


def make(settings: GRPOLoss) -> Loss:
    """Returns the loss with these settings."""
    clipping = centered(settings.listed_ids, ppo_clip(settings.clip_low, settings.clip_high))
    return Loss(token_ratio, sequence_masked(settings.sequence_mask, clipping), trajectory_mean)
