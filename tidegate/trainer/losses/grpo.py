"""GRPO (Shao et al., DeepSeekMath, 2024).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
normalisation   mean over a trajectory's tokens, then over trajectories
"""

from __future__ import annotations

from tidegate.settings.losses import GRPOLoss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, sequence_mean, token_ratio


def make(settings: GRPOLoss) -> Loss:
    return Loss(token_ratio, ppo_clip(settings.clip_low, settings.clip_high), sequence_mean)
