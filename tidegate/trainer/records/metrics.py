"""Metrics of a run: `metrics.jsonl`, one flat JSON object per step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.config import TrainerSettings
from tidegate.errors import TidegateError
from tidegate.trainer.ledger.jsonl import AppendedFile, drop_torn_line, naming, read_jsonl

FILE = "metrics.jsonl"
Value = float | int | bool | str | None


class MetricsLog(AppendedFile):
    """Appends a line per step and flushes it at once, so that the file can be followed.

    Opening the file removes an incomplete last line.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        run_dir.mkdir(parents=True, exist_ok=True)
        drop_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> None:
        """Append the line of one step.

        Args:
            line: `step`, `version`, `time` (Unix seconds; by default now) and metrics. NumPy and torch
                scalars become Python numbers; NaN and infinities become null.

        Raises:
            KeyError: The line has no step or version.
            TypeError: A value is not flat.
            OSError: The file cannot be written.
        """
        text = _text(line)
        with failpoints.around("metrics.line"), naming(self.path):
            self._file.write(text)
            self._file.flush()

    def add_to_last(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Add metrics to the newest line, as `append`; returns the line."""
        *lines, last = read_metrics(self.path.parent)
        last |= metrics
        with naming(self.path):
            self._rewrite([*lines, last])
        return last

    def truncate_after(self, step: int) -> int:
        """Drop the lines of later steps, which a resumed run takes again. Returns the number dropped."""
        lines = read_metrics(self.path.parent)
        remaining = [line for line in lines if line["step"] <= step]
        self._rewrite(remaining)
        return len(lines) - len(remaining)

    def _rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file.close()
        partial = self.path.with_name(f".{FILE}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(map(_text, lines))
            file.flush()
            # Before the rename: the loss of the machine must not leave an empty file in place of all lines.
            os.fsync(file.fileno())
        with failpoints.around("metrics.truncated"):
            partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run in order; empty if there is no file yet.

    An incomplete last line is left out. Raises TidegateError if another one is not an object with `step`.
    """
    path = run_dir / FILE
    lines = list(read_jsonl(path))
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or "step" not in line:
            raise TidegateError(f"{path}, line {number}: not a line of metrics: it has no step")
    return lines


def reached(run_dir: Path, trainer: TrainerSettings, step: int) -> str | None:
    """Return how the evaluation after `step` reached `trainer.until`, in words; None if it did not."""
    for line in read_metrics(run_dir) if trainer.until is not None else ():
        if line["step"] == step and trainer.reached(line):
            reward = f"{line['eval/reward']:.3f}"
            return (
                f"the held-out reward after step {step}, {reward}, reached trainer.until = {trainer.until:g}"
            )
    return None


def _text(line: Mapping[str, Any]) -> str:
    head = {"step": line["step"], "version": line["version"], "time": line.get("time", time.time())}
    plain = {name: _plain(name, value) for name, value in {**head, **line}.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _plain(name: str, value: Any) -> Value:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(
        f"metric {name!r} is a {type(value).__name__}; metrics must be numbers, text, booleans or None"
    )
