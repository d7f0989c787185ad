"""Makes the loss that the settings name."""

from __future__ import annotations

import importlib
from dataclasses import replace

from tidegate.config import TrainerSettings
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import reference_penalty


def make_loss(settings: TrainerSettings) -> Loss:
    """Returns the loss, with the penalty for the distance to the reference model if one is set.

    A loss named `x` is made by `make` in the module `tidegate/trainer/losses/x.py`. Raises ConfigError if a
    function of the user's own cannot be loaded, or returns no `Loss`.
    """
    module = importlib.import_module(f"tidegate.trainer.losses.{settings.loss.name}")
    loss: Loss = module.make(settings.loss)
    if not settings.kl_coef:
        return loss
    return replace(loss, penalty=reference_penalty(settings.kl_estimator, settings.kl_coef))
