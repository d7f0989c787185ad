"""Metrics of an episode's tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.types import ToolCall


def tool_metrics(calls: Sequence[ToolCall]) -> dict[str, float]:
    """Returns the number of calls, the number of errors among them, and the seconds that they took."""
    return {
        "tool_calls": float(len(calls)),
        "tool_errors": float(sum(call.error for call in calls)),
        "tool_seconds": sum(call.seconds for call in calls),
    }
