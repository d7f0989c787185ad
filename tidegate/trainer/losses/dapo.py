"""DAPO (Yu et al., 2025).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           π_θ/μ of each token
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) with high > low (clip-higher, §3.1);
                at least `dual_clip` · A where A < 0 (Ye et al., arXiv 1912.09729, 2020)
mask            tokens with A < 0 in rows whose mean log μ/π_θ exceeds `sequence_mask`, if that is set
                (DeepSeek-V3.2, arXiv 2512.02556, 2025)
centering       minus A · C over the sampler's likeliest ids, if `score_centering` is set (`centering`)
normalisation   mean over all trained tokens of the batch (§3.3)

Its other parts are settings of the trainer: `dynamic_sampling`, `truncated_episodes`, `length_penalty`.
"""

from __future__ import annotations

from tidegate.settings.losses import DAPOLoss
from tidegate.trainer.losses.centering import centered
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import dual_clipped, ppo_clip, sequence_masked, token_mean, token_ratio


def make(settings: DAPOLoss) -> Loss:
    """Returns the loss with these settings."""
    clipping = dual_clipped(settings.dual_clip, ppo_clip(settings.clip_low, settings.clip_high))
    clipping = centered(settings.listed_ids, clipping)
    return Loss(token_ratio, sequence_masked(settings.sequence_mask, clipping), token_mean)
