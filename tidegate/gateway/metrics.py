"""Counters of one gateway. Label values come from fixed sets, never from sessions or texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass

from prometheus_client import Histogram

from tidegate.prometheus import histogram, labelled, level

PREFIX = "tidegate_gateway"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Covers one token of a tiny model up to a long reply that is interrupted by a publish."""


@dataclass(slots=True)
class GatewayMetrics:
    """Counts since the gateway's start, each the metric `tidegate_gateway_<field>_total`."""

    turns: int = 0
    undelivered_turns: int = level()
    abandoned_calls: int = 0
    client_closed_turns: int = 0
    """Streams closed by their clients after a part of the reply."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    rendered_tokens: int = 0
    _: KW_ONLY
    rerendered_tokens: int = 0
    """Tokens of roots after a session's first, which is the cost of branches."""
    drifted_turns: int = 0
    """Prompts that did not start with the recorded ids; more than 0 means a bug in the gateway."""
    unknown_version_turns: int = 0
    retries_joined: int = 0
    turn_seconds: Histogram = histogram(f"{PREFIX}_turn_seconds", _SECONDS)
    """Seconds from a request to its recorded reply."""
    branches: Counter[str] = labelled("reason")
    outcomes: Counter[str] = labelled("outcome")
    refusals: Counter[str] = labelled("code")
    overridden_parameters: Counter[str] = labelled("parameter")
    """Training requests by the agent's sampling parameter that was overridden."""
    tool_call_parses: Counter[str] = labelled("status")
    tool_calls: Counter[str] = labelled("tool")
    """Calls of environments' tools; names that no environment has are counted as `unknown`."""
    tool_errors: Counter[str] = labelled("tool")
    tool_seconds: Histogram = histogram(f"{PREFIX}_tool_seconds", _SECONDS)
