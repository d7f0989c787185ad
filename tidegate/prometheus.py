"""Writes metrics in Prometheus' text format."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate


class Histogram:
    """Counts values by their upper bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Count per bound of the values between the previous bound and this one; last: above all bounds."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


Value = float | Histogram | Mapping[str, float]
Family = tuple[str, str, Value, str]
"""Name (with the prefix unless it begins with `tidegate_`), type, value or values by label, label name."""


def prometheus(prefix: str, families: Iterable[Family]) -> str:
    """Returns the exposition text of some metrics."""
    lines = []
    for name, kind, value, label in families:
        full = name if name.startswith("tidegate_") else f"{prefix}_{name}"
        lines.append(f"# TYPE {full} {kind}")
        if isinstance(value, Histogram):
            lines += _buckets(full, value)
        elif isinstance(value, Mapping):
            lines += [f'{full}{{{label}="{_escape(key)}"}} {_number(value[key])}' for key in sorted(value)]
        else:
            lines.append(f"{full} {_number(value)}")
    return "\n".join(lines) + "\n"


def _buckets(full: str, histogram: Histogram) -> list[str]:
    counts = list(accumulate(histogram.counts))
    bounds = [*map(_number, histogram.bounds), "+Inf"]
    lines = [f'{full}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
    return [*lines, f"{full}_sum {_number(histogram.total)}", f"{full}_count {counts[-1]}"]


def _number(value: float) -> str:
    """Returns a number with all digits (large counters must not be rounded), or `NaN`, `+Inf`, `-Inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if value != int(value) else str(int(value))


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def merged(texts: Mapping[str, str], label: str) -> str:
    """Returns the texts of several processes as one; every sample gets `label` with its process.

    Samples are not added up, because ratios and quantiles cannot be; PromQL can do it with `sum without (…)`.
    """
    families: dict[str, list[str]] = {}
    for key, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line, [])
                continue
            name, space, value = line.rpartition(" ")
            pair = f'{label}="{_escape(key)}"'
            labels = f"{name[:-1]},{pair}}}" if name.endswith("}") else f"{name}{{{pair}}}"
            family.append(f"{labels}{space}{value}")
    return "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items())
