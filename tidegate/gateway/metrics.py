"""What one gateway counts. No label has more values than its code knows: never a session, nor a text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tidegate.prometheus import Histogram

TURN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""A turn takes from a token of a tiny model to a long answer across a publish."""


@dataclass(slots=True)
class GatewayMetrics:
    """What was counted since the start."""

    turns: int = 0
    undelivered_turns: int = 0
    abandoned_calls: int = 0
    client_closed_turns: int = 0
    """Streams that their clients closed after a part of the reply."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    rendered_tokens: int = 0
    rerendered_tokens: int = 0
    """Of roots after a session's first: what branches cost."""
    drifted_turns: int = 0
    """Prompts that did not start with the recorded ids; anything but 0 is a fault of the gateway's."""
    unknown_version_turns: int = 0
    retries_joined: int = 0
    turn_seconds: Histogram = field(default_factory=lambda: Histogram(TURN_SECONDS))
    """From a request to its recorded reply."""
    branches: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    overridden: Counter[str] = field(default_factory=Counter)
    """Requests in training by the agent's sampling parameter that had no effect."""
    parses: Counter[str] = field(default_factory=Counter)
