"""How deep JSON may be nested.

The library reads 1,024 levels and writes 254, and what came or was sampled is written again within other
JSON. So all of it is held to one bound, far from those.
"""

from __future__ import annotations

from typing import Any

MOST_LEVELS = 100
"""Of a call's arguments, sent or sampled."""
MOST_BODY_LEVELS = MOST_LEVELS + 20
"""Of a request's body, which has arguments within messages."""


def too_deep(value: Any, most: int = MOST_LEVELS) -> bool:
    """Whether lists and objects are nested in a JSON value more than `most` levels deep."""
    level = _containers([value])
    for _ in range(most):
        if not level:
            return False
        level = [inner for one in level for inner in _containers(one.values() if type(one) is dict else one)]
    return bool(level)


def _containers(values: Any) -> list[Any]:
    return [one for one in values if type(one) is dict or type(one) is list]
