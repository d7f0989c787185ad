"""Writes metrics as TensorBoard event files in the run's directory."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from tidegate.config import Settings
from tidegate.trainer.loggers.values import scalars


class TensorBoard:
    """Writes a scalar per metric, named as in `metrics.jsonl`, to `<run>/tensorboard`.

    Purges what an earlier start of the run wrote for steps after `step`, the one it resumes from.
    """

    def __init__(self, settings: Settings, step: int) -> None:
        self._writer = SummaryWriter(
            str(settings.run_dir / "tensorboard"), purge_step=step + 1, flush_secs=10
        )

    def step(self, metrics: Mapping[str, float]) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["step"]), walltime=metrics["time"])

    def close(self) -> None:
        self._writer.close()


make = TensorBoard
