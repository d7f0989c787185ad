"""Limits the nesting depth of JSON.

orjson reads 1,024 levels and writes 254, and received or sampled JSON is written again inside other JSON. The
limits here stay well below both.
"""

from __future__ import annotations

from typing import Any

MAX_LEVELS = 100
"""Levels of a tool call's arguments, received or sampled."""
MAX_BODY_LEVELS = MAX_LEVELS + 20
"""Levels of a request body, which contains arguments within messages."""


def too_deep(value: Any, max_levels: int = MAX_LEVELS) -> bool:
    """Returns whether a JSON value has more than `max_levels` levels of lists and objects."""
    level = _containers([value])
    for _ in range(max_levels):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in _containers(outer.values() if type(outer) is dict else outer)
        ]
    return bool(level)


def _containers(values: Any) -> list[Any]:
    return [value for value in values if type(value) is dict or type(value) is list]
