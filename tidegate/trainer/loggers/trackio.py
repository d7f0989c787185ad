"""Writes metrics with trackio, which itself reads `TRACKIO_DIR`, `TRACKIO_SERVER_URL` and similar."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from tidegate.config import Settings
from tidegate.trainer.loggers.values import public_settings, scalars

PROJECT = "tidegate"


class Trackio:
    """Creates a trackio run for each start of a run; those of one run form a group."""

    def __init__(self, settings: Settings, step: int) -> None:
        self._run = trackio.init(
            project=PROJECT,
            name=settings.run.name,
            group=settings.run.name,
            config=public_settings(settings),
            # No output in a notebook, and no samples of its own beside `load.jsonl`.
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def step(self, metrics: Mapping[str, float]) -> None:
        self._run.log(scalars(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]


make = Trackio
