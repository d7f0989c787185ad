"""DAPO (Yu et al., 2025).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) with high > low (clip-higher, §3.1)
normalisation   mean over all trained tokens of the batch (§3.3)

Its other parts are settings of the trainer: `dynamic_sampling`, `truncated_episodes`, `length_penalty`.
"""

from __future__ import annotations

from tidegate.settings.losses import DAPOLoss
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, token_mean, token_ratio


def make(settings: DAPOLoss) -> Loss:
    return Loss(token_ratio, ppo_clip(settings.clip_low, settings.clip_high), token_mean)
