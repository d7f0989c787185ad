"""`canary.json`: the state of the test of a version, for readers of the run's directory."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from tidegate.service.serve import write_atomically
from tidegate.trainer.publish.sequential_test import LEAST, Comparison

FILE = "canary.json"


@dataclass(slots=True)
class CanaryState:
    """Writes the file whenever the test has more rewards.

    Args:
        run_dir: Directory of the run.
        margin: `trainer.promotion.margin`.
    """

    run_dir: Path
    margin: float
    _written: tuple[int, Comparison] | None = None

    def write(self, version: int, comparison: Comparison) -> None:
        """Write the test of `version`: means, numbers of rewards, and bounds of the difference once known."""
        if self._written == (version, comparison):
            return
        self._written = version, comparison
        bounds = {"low": comparison.low, "high": comparison.high}
        state = {
            "time": time.time(),
            "version": version,
            "margin": self.margin,
            "least": LEAST,
            **comparison.figures(),
            **{name: bound if math.isfinite(bound) else None for name, bound in bounds.items()},
        }
        write_atomically(self.run_dir / FILE, json.dumps(state))
