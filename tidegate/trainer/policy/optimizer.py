"""The optimiser of a policy, and the learning rate of each of its steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from tidegate.config import TrainerSettings

FINAL_RATE = 0.1
"""Share of the learning rate left at the last step of a schedule that falls."""


def adamw(model: Any, settings: TrainerSettings) -> torch.optim.AdamW:
    """Create AdamW over the trainable parameters, with weight decay on matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.learning_rate, fused=True
    )


def learning_rate(settings: TrainerSettings, done: int) -> float:
    """Return the learning rate after `done` steps.

    It rises linearly over `warmup_steps`, then stays constant, or falls to FINAL_RATE at `steps` linearly or
    as half a period of a cosine.
    """
    rate = settings.learning_rate * min(1.0, (done + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant":
        return rate
    share = min(1.0, done / max(1, settings.steps - 1))
    if settings.schedule == "cosine":
        share = (1.0 - math.cos(math.pi * share)) / 2
    return rate * (1.0 - (1.0 - FINAL_RATE) * share)
