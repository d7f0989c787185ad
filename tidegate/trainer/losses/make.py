"""Makes the loss that the settings name."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace

from tidegate.config import TrainerSettings
from tidegate.trainer.losses.loss import Loss, Penalty
from tidegate.trainer.losses.parts import added, reference_penalty, teacher_penalty


def make_loss(settings: TrainerSettings) -> Loss:
    """Returns the loss, with the penalties for the distance to the reference model and the teacher, if set.

    A loss named `x` is made by `make` in the module `tidegate/trainer/losses/x.py`. Raises ConfigError if a
    function of the user's own cannot be loaded, or returns no `Loss`.
    """
    module = importlib.import_module(f"tidegate.trainer.losses.{settings.loss.name}")
    loss: Loss = module.make(settings.loss)
    penalties: list[Penalty] = []
    if settings.kl_coef:
        penalties.append(reference_penalty(settings.kl_estimator, settings.kl_coef))
    if settings.teacher.enabled:
        penalties.append(teacher_penalty(settings.teacher.form, settings.teacher.weight))
    return replace(loss, penalty=functools.reduce(added, penalties)) if penalties else loss
