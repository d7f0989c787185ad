"""Determines the reason that a turn records for being a branch."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.gateway.sessions.history import RequestHistory


def branch_reason(
    history: RequestHistory, earlier: Sequence[RequestHistory], parent: int | None, start: int, newest: int
) -> str:
    """Names the first difference from the earlier request with which `history` shares most messages.

    `history` extends turn `parent`, which is not the newest turn `newest`, by its messages from `start` on.
    `earlier` is ordered from newest to oldest.
    """
    same_tools = [
        other
        for other in earlier
        if other.tools_hash == history.tools_hash and other.hashes != history.hashes
    ]
    if not same_tools:
        return f"tools: they or the template's options differ from those of turn {newest}"
    nearest = max(same_tools, key=history.common_length)
    whose = "the last" if nearest is earlier[0] else "an earlier"
    common = history.common_length(nearest)
    if common == len(history.hashes):
        return f"rewound: {common} messages, {whose} request had {len(nearest.hashes)}"
    changed = f"edited: message {common} ({history.messages[common].get('role')})"
    if common < len(nearest.hashes) and nearest is earlier[0]:
        return f"{changed} differs from {whose} request's"
    if parent is not None and all(message["role"] != "assistant" for message in history.messages[start:]):
        return f"older: turn {parent} is continued, the newest is turn {newest}"
    if common < len(nearest.hashes):
        return f"{changed} differs from {whose} request's"
    return f"{changed} is not the recorded reply"
