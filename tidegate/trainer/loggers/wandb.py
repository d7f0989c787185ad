"""Sends metrics to Weights & Biases. wandb itself reads `WANDB_MODE`, `WANDB_PROJECT` and similar."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from tidegate.config import Settings
from tidegate.trainer.loggers.values import public_settings


class WeightsAndBiases:
    """Opens a wandb run for each start of a run; those of one run form a group."""

    def __init__(self, settings: Settings, step: int) -> None:
        self._run = wandb.init(
            name=settings.run.name,
            group=settings.run.name,
            dir=str(settings.run_dir),
            config=public_settings(settings),
            settings=wandb.Settings(console="off", silent=True),  # the live view owns the terminal
        )
        # Use `step` as the axis: wandb's own counter cannot go back to a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics))

    def close(self) -> None:
        self._run.finish()


make = WeightsAndBiases
