"""Metrics for Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT` and the like are wandb's own to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from tidegate.config import Settings


class WeightsAndBiases:
    """A wandb run for each start of a run; those of one run are a group.

    Of the settings it gets what cannot hold a key: neither the gateway's nor anybody's options.
    """

    def __init__(self, settings: Settings) -> None:
        self._run = wandb.init(
            name=settings.run.name,
            group=settings.run.name,
            dir=str(settings.run_dir),
            config=_public(settings),
            settings=wandb.Settings(console="off", silent=True),  # the terminal is the view's
        )
        # Steps are an axis and not wandb's own counter, which could not go back to a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics))

    def close(self) -> None:
        self._run.finish()


def _public(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(
        mode="json",
        exclude={"gateway": True, "agent": {"options"}, "env": {"options"}, "engine": {"urls"}},
    )
