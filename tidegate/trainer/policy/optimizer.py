"""The optimiser of a policy, and the learning rate of each of its steps."""

from __future__ import annotations

from typing import Any

import torch

from tidegate.config import TrainerSettings

FINAL_RATE = 0.1
"""What is left of the learning rate at the last step of a linear schedule."""


def adamw(model: Any, settings: TrainerSettings) -> torch.optim.AdamW:
    """AdamW over what is trained of a model; weight decay on matrices only, as usual."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.learning_rate, fused=True
    )


def learning_rate(settings: TrainerSettings, done: int) -> float:
    """After so many steps: a linear warm-up over `warmup_steps`, then constant, or linear to FINAL_RATE at
    `steps`."""
    rate = settings.learning_rate * min(1.0, (done + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant":
        return rate
    share = min(1.0, done / max(1, settings.steps - 1))
    return rate * (1.0 - (1.0 - FINAL_RATE) * share)
