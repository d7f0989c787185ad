"""The policy as the training loop needs it, wherever its gradients are computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.checkpoint.checkpoint import Restorable


class TrainedPolicy(Restorable, Protocol):
    """A policy with its optimiser. Methods block: call them in a thread.

    Attributes:
        non_finite: ids of the groups whose loss or gradient was not finite in the last batch.
        untrained: ids of the groups of the last batch on which no optimiser step was taken.
    """

    non_finite: list[str]
    untrained: list[str]

    def backward(self, rows: Sequence[TrainingSequence], version: int) -> None:
        """Compute gradients of a batch, or of one of its minibatches when streaming.

        Args:
            rows: rows to train on.
            version: version of the current weights.
        """

    def optimizer_step(self) -> dict[str, float]:
        """Take the batch's last optimiser step and return the batch's metrics; `skipped` is 1 if none was
        taken."""

    def save_weights(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write the weights, in a form that the run's engines load. Raises OSError."""

    def save_adapter(self, directory: Path, *, dtype: str = "float32") -> Path:
        """Write the adapter alone, for `trainer.lora.publish`. Raises OSError."""

    def weight_buckets(
        self, max_bytes: int, as_files: str | None = None, *, on_device: bool = False
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the parameters in buckets of at most `max_bytes`; nothing if they are held elsewhere."""
