"""Dr. GRPO (Liu et al., Understanding R1-Zero-Like Training, 2025).

advantage       reward less the group's mean, not divided
ratio           π_θ/μ of each token
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
mask            tokens with A < 0 in rows whose mean log μ/π_θ exceeds `sequence_mask`, if that is set
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   sum over tokens ÷ (trajectories · `sequence_length`): tokens of long answers weigh no less
"""

from __future__ import annotations

from tidegate.settings.losses import DrGRPOLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, sequence_masked, sequence_sum, token_ratio


def make(settings: DrGRPOLoss) -> Loss:
    """Returns the loss with these settings."""
    clipping = centered(settings.listed_ids, ppo_clip(settings.clip_low, settings.clip_high))
    clipping = sequence_masked(settings.sequence_mask, clipping)
    return Loss(token_ratio, clipping, sequence_sum(settings.sequence_length))
