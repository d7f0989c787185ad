"""Comparisons of scores that the benchmark and the tests share."""

from __future__ import annotations

import sys

from tests import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from adapting import scores

PEERS = scores.PEERS


def equal_scores(library: str) -> None:
    """Asserts that 200 episodes score the same through Tidegate as by the library, and not all alike."""
    pairs = scores.SCORES[library]()
    assert len(pairs) == scores.EPISODES
    assert scores.mismatches(pairs) == 0
    assert len({ours for ours, _ in pairs}) > 1
