"""Formats numbers, times and sparklines, and makes text safe to print."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import pairwise
from typing import Any

_ANY_SIZE = Context(prec=400)
BLOCKS = "▁▂▃▄▅▆▇█"
# C0 and C1 controls except newline and tab, bidirectional overrides, and lone surrogates. Models may write
# them, and they would move the cursor, reverse a line or fail to encode.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Replaces characters that control a terminal by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", str(text).replace("\r\n", "\n"))


def known(value: object) -> float | None:
    """Returns the value as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_list(value: object) -> list[Any]:
    """Returns a list of a record; empty if the value is something else."""
    return value if isinstance(value, list) else []


def as_mapping(value: object) -> Mapping[str, Any]:
    """Returns a mapping of a record; empty if the value is something else."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Returns the mappings in a list of a record; leaves everything else out."""
    return [part for part in as_list(value) if isinstance(part, Mapping)]


def plain(value: object) -> str:
    """Formats a whole number that is a name, such as a version, without separators."""
    found = known(value)
    return "–" if found is None else f"{found:.0f}"


def number(value: object, digits: int = 3, missing: str = "–") -> str:
    """Formats a number with `digits` decimals and separated thousands.

    Rounds the decimal representation half away from zero, as browsers do: rounding the binary value of
    0.0005 would give 0.000 here and 0.001 in the dashboard.
    """
    finite = known(value)
    if finite is None:
        return missing
    rounded = Decimal(repr(finite)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _ANY_SIZE)
    return f"{rounded:,f}"


def duration(seconds: float) -> str:
    """Formats seconds as `0:07`, `12:34` or `1:02:03`."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def binned(values: Sequence[float], bins: int) -> list[float]:
    """Returns at most `bins` means of neighbouring values."""
    count = len(values)
    if count <= bins:
        return list(values)
    edges = [index * count // bins for index in range(bins + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None
) -> str:
    """Returns a line of at most `width` blocks; `low` and `high` default to the values' range."""
    if not values or width < 1:
        return ""
    shown = binned(values, width)
    bottom = min(shown) if low is None else low
    top = max(shown) if high is None else high
    span = top - bottom
    if span <= 0:
        return BLOCKS[0] * len(shown)
    scaled = ((min(max(value, bottom), top) - bottom) / span for value in shown)
    return "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in scaled)


def smoothed(values: Sequence[float], weight: float = 0.2) -> list[float]:
    """Returns the bias-corrected exponential moving average; `weight` is the newest value's share."""
    total = share = 0.0
    out = []
    for value in values:
        total = (1 - weight) * total + weight * value
        share = (1 - weight) * share + weight
        out.append(total / share)
    return out
