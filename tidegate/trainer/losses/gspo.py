"""GSPO-token (Zheng et al., Group Sequence Policy Optimization, 2025, §4.3).

advantage       reward less the group's mean, ÷ the group's standard deviation
ratio           (π_θ(y)/μ(y))^(1/|y|) of the row's trained tokens y, with the gradient of the token's own
clipping        min(ratio · A, clip(ratio, 1 − low, 1 + high) · A)
normalisation   mean over a trajectory's tokens, then over trajectories
"""

from __future__ import annotations

from torch import Tensor

from tidegate.settings.losses import GSPOLoss
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, row_mean, token_ratio, trajectory_mean


def make(settings: GSPOLoss) -> Loss:
    """Returns the loss with these settings."""
    return Loss(_token_ratio, ppo_clip(settings.clip_low, settings.clip_high), trajectory_mean)


def _token_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """Log of GSPO-token's ratio, sg[s] · π_θ ÷ sg[π_θ] with s = (π_θ(y)/μ(y))^(1/|y|) over the row's
    trained tokens.

    Every token has the value of the sequence's ratio and its own gradient, so that it is weighted by its own
    advantage. If all tokens of a row have the same advantage, the gradient equals GSPO's.
    """
    return row_mean(token_ratio(logprobs_n, batch).detach(), batch) + logprobs_n - logprobs_n.detach()
