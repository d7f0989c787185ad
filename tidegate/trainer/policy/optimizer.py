"""The optimiser of a policy, and the learning rate of each of its steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from tidegate.config import TrainerSettings

BETA2 = 0.999
"""Decay of AdamW's mean of the squared gradients."""
FINAL_RATE = 0.1
"""Share of the learning rate left at the last step of a schedule that falls."""


def suitable_rate(parameters: int, *, lora: bool) -> float:
    """Return the default learning rate of a model, with one significant digit.

    A power law through the rates that served models of 0.9 million (3e-4), 135 million (6e-6) and more than a
    billion parameters (1e-6). LoRA needs ten times the rate of full training (Schulman et al., LoRA Without
    Regret, 2025).

    Args:
        parameters: Number of parameters of the whole model.
        lora: Whether only the small matrices of LoRA are trained.
    """
    rate = 1e-6 * max(1.0, 1.2e9 / parameters) ** 0.8
    return float(f"{rate * (10 if lora else 1):.0e}")


def adamw(model: Any, settings: TrainerSettings) -> torch.optim.AdamW:
    """Create AdamW over the trainable parameters, with weight decay on matrices only."""
    assert settings.learning_rate is not None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, BETA2),
        fused=True,
    )


def learning_rate(settings: TrainerSettings, done: int) -> float:
    """Return the learning rate after `done` steps.

    It rises linearly over `warmup_steps`, then stays constant, or falls to FINAL_RATE at `steps` linearly or
    as half a period of a cosine.
    """
    assert settings.learning_rate is not None  # Policy has replaced None by the rate that suits the model
    rate = settings.learning_rate * min(1.0, (done + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant":
        return rate
    share = min(1.0, done / max(1, settings.steps - 1))
    if settings.schedule == "cosine":
        share = (1.0 - math.cos(math.pi * share)) / 2
    return rate * (1.0 - (1.0 - FINAL_RATE) * share)
