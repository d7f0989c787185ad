"""Tests a candidate version on a share of the clients' conversations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.gateway.client import GroupRow
from tidegate.trainer.publish.sequential_test import Comparison, compare


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
            if group.oldest_version == newest == self.version:
                self._candidate[group.id] = group.reward
            elif newest < self.version:
                self._live[group.id] = group.reward

    def compare(self, margin: float) -> Comparison:
        return compare([*self._candidate.values()], [*self._live.values()], margin)
