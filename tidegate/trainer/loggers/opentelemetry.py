"""Sends a span per step by OpenTelemetry; the gateway sends those of episodes (`gateway.tracing`)."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.config import Settings
from tidegate.service.tracing import Spans
from tidegate.trainer.loggers.values import scalars

PHASES = ("wait_for_batch", "update", "publish_gate", "publish")
"""Parts of a step in their order, as `time/<part>` has their seconds."""


class StepSpans:
    """Sends a span per step, with the step's metrics as attributes and its parts as children.

    A part begins where the one before it ended; time between them is seen at the end of the step.
    """

    def __init__(self, settings: Settings, step: int) -> None:
        self._spans = Spans("tidegate-trainer")
        self._run = settings.run.name

    def step(self, metrics: Mapping[str, float]) -> None:
        if "time/step" not in metrics:  # an evaluation before the first step
            return
        end = metrics["time"]
        began = end - metrics["time/step"]
        attributes: dict[str, str | float] = {
            "tidegate.run": self._run,
            "tidegate.step": int(metrics["step"]),
        }
        span = self._spans.add("step", began, end, {**scalars(metrics), **attributes})
        for phase in PHASES:
            seconds = metrics.get(f"time/{phase}")
            if seconds is not None:
                self._spans.add(phase, began, began + seconds, attributes, parent=span)
                began += seconds

    def close(self) -> None:
        self._spans.close()


make = StepSpans
