"""Negative log likelihood, the loss of supervised fine-tuning (`tidegate sft`).

advantage       1
ratio           none: it does not matter which policy sampled the token
normalisation   mean over all trained tokens of the batch
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.settings.losses import NLLLoss
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import token_mean


def make(settings: NLLLoss) -> Loss:
    """Returns the loss with these settings."""
    return Loss(_no_ratio, _log_likelihood, token_mean)


def _no_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    return torch.zeros_like(logprobs_n)


def _log_likelihood(_: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
    return logprobs_n, torch.zeros_like(logprobs_n, dtype=torch.bool)
