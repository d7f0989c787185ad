"""Counters of one gateway. Label values come from fixed sets, never from sessions or texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidegate.prometheus import Histogram

TURN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Covers one token of a tiny model up to a long reply that is interrupted by a publish."""


@dataclass(slots=True)
class GatewayMetrics:
    """Counts since the gateway's start."""

    turns: int = 0
    undelivered_turns: int = 0
    abandoned_calls: int = 0
    client_closed_turns: int = 0
    """Streams closed by their clients after a part of the reply."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    rendered_tokens: int = 0
    rerendered_tokens: int = 0
    """Tokens of roots after a session's first, which is the cost of branches."""
    drifted_turns: int = 0
    """Prompts that did not start with the recorded ids; more than 0 means a bug in the gateway."""
    unknown_version_turns: int = 0
    retries_joined: int = 0
    turn_seconds: Histogram = field(default_factory=lambda: Histogram(TURN_SECONDS))
    """Seconds from a request to its recorded reply."""
    branches: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    overridden: Counter[str] = field(default_factory=Counter)
    """Training requests by the agent's sampling parameter that was overridden."""
    parses: Counter[str] = field(default_factory=Counter)
