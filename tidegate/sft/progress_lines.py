"""Shows a fine-tuning: a bar on a terminal, and a line for about every tenth of the steps."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.observer import Silent
from tidegate.progress import LINES, Progress

SHOWN = {"loss": "loss", "validation/loss": "validation loss", "eval/reward": "held-out reward"}


class ProgressLines(Silent):
    """An observer that prints the losses and rewards of steps."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar = progress.stage("fine-tuning") if progress.is_terminal else None
        self._printed = 0

    def started(self, info: Mapping[str, object]) -> None:
        if info["resumed_from"] is not None:
            self.note(f"resumed from step {info['resumed_from']}")

    def note(self, text: str) -> None:
        self._progress.print(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        step, steps = int(metrics["step"]), int(metrics["sft/steps"])
        if self._bar is not None:
            self._bar(step, steps)
        reached = step * LINES // steps
        if reached > self._printed or len(SHOWN.keys() & metrics.keys()) > 1 or "loss" not in metrics:
            self._printed = reached
            cells = [f"{name} {metrics[key]:.4f}" for key, name in SHOWN.items() if key in metrics]
            self._progress.print(f"step {step:>{len(str(steps))}}/{steps}  {'  '.join(cells)}".rstrip())
