"""Formats numbers, times and sparklines, and makes text safe to print."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import pairwise

_ANY_SIZE = Context(prec=400)
BLOCKS = "▁▂▃▄▅▆▇█"
# C0 and C1 controls but newline and tab, the bidirectional overrides, and lone surrogates: a model may
# write any of them, and none may move a cursor, reverse a line or break an encoder.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """The text without what could drive a terminal; such characters become U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", str(text).replace("\r\n", "\n"))


def known(value: object) -> float | None:
    """The value as a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: object, digits: int = 3, missing: str = "–") -> str:
    """A number with so many decimals and separated thousands; rewards have three.

    Rounds what is written, half away from zero, as browsers do: the binary value of 0.0005 would give 0.000
    here and 0.001 in the dashboard.
    """
    found = known(value)
    if found is None:
        return missing
    rounded = Decimal(repr(found)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _ANY_SIZE)
    return f"{rounded:,f}"


def duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def binned(values: Sequence[float], bins: int) -> list[float]:
    """The values as at most `bins` means of neighbours."""
    count = len(values)
    if count <= bins:
        return list(values)
    edges = [index * count // bins for index in range(bins + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None
) -> str:
    """The values as a line of blocks at most `width` wide, between `low` and `high` (their own range)."""
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
    """Exponential moving average, corrected for its start: `weight` is the newest value's share."""
    total = share = 0.0
    out = []
    for value in values:
        total = (1 - weight) * total + weight * value
        share = (1 - weight) * share + weight
        out.append(total / share)
    return out
