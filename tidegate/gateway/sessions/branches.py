"""Why a request is a branch: the reason that its turn records."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.gateway.sessions.history import RequestHistory


def branch_reason(
    line: RequestHistory, earlier: Sequence[RequestHistory], parent: int | None, start: int, newest: int
) -> str:
    """Names the first difference from the earlier request that `line` resembles most.

    `line` extends turn `parent` by its messages from `start` on; `newest` is the newest turn, and another
    one. `earlier` has the newest request first.
    """
    alike = [one for one in earlier if one.root == line.root and one.keys != line.keys]
    if not alike:
        return f"tools: they or the template's options differ from those of turn {newest}"
    near = max(alike, key=line.agreement)
    whose = "the last" if near is earlier[0] else "an earlier"
    at = line.agreement(near)
    if at == len(line.keys):
        return f"rewound: {at} messages, {whose} request had {len(near.keys)}"
    changed = f"edited: message {at} ({line.messages[at].get('role')})"
    if at < len(near.keys) and near is earlier[0]:
        return f"{changed} differs from {whose} request's"
    if parent is not None and all(message["role"] != "assistant" for message in line.messages[start:]):
        return f"older: turn {parent} is continued, the newest is turn {newest}"
    if at < len(near.keys):
        return f"{changed} differs from {whose} request's"
    return f"{changed} is not the recorded reply"
