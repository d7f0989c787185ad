"""Tests a candidate version on a share of the clients' conversations, and writes the state of the test."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.gateway.client import GroupRow
from tidegate.service.serve import write_atomically
from tidegate.trainer.publish.sequential_test import LEAST, Comparison, compare

FILE = "canary.json"
"""State of the test, for readers of the run's directory."""


@dataclass(slots=True)
class CanaryTest:
    """Rewards of the conversations that began since the test and sample from one version alone.

    Args:
        version: The candidate.
        earlier: Ids of the groups that existed when the test began; they are not counted.
    """

    version: int
    earlier: set[str]
    _candidate: dict[str, float] = field(default_factory=dict)
    _live: dict[str, float] = field(default_factory=dict)

    def add(self, groups: Iterable[GroupRow]) -> None:
        """Add the rewards of groups that have ended; one that is listed again counts once."""
        for group in groups:
            newest = group.newest_version
            if group.id in self.earlier or group.reward is None or newest is None:
                continue
            # A conversation with tokens of both versions is evidence about neither.
            if group.oldest_version == newest == self.version:
                self._candidate[group.id] = group.reward
            elif newest < self.version:
                self._live[group.id] = group.reward

    def compare(self, margin: float) -> Comparison:
        return compare([*self._candidate.values()], [*self._live.values()], margin)


def write_state(run_dir: Path, margin: float, version: int, comparison: Comparison) -> None:
    """Write the test of `version` to `canary.json`: means, numbers of rewards, and bounds of the difference
    once known."""
    bounds = {"low": comparison.low, "high": comparison.high}
    state = {
        "time": time.time(),
        "version": version,
        "margin": margin,
        "least": LEAST,
        **comparison.figures(),
        # JSON has no infinity.
        **{name: bound if math.isfinite(bound) else None for name, bound in bounds.items()},
    }
    write_atomically(run_dir / FILE, json.dumps(state))
