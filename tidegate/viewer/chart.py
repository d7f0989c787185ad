"""Line and area charts as data, which the page draws in its colours, for light and dark modes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Point = tuple[float, float]
Tone = Literal["accent", "ink", "muted", "sand", "warn"]
Form = Literal["line", "thin", "dash", "dots", "dashdots", "area"]

MOST_POINTS = 300
STEP = "step"


@dataclass(frozen=True, slots=True)
class Series:
    """`peak`: where points are drawn together, their maximum is shown, not their mean."""

    name: str
    points: Sequence[Point]
    tone: Tone = "accent"
    form: Form = "line"
    peak: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: its legend as (name, colour, shape), and `data`, JSON from which the page draws it."""

    title: str
    note: str
    legend: tuple[tuple[str, str, str], ...]
    data: str


def lines(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    axes: tuple[str, str] = (STEP, ""),
    y_range: tuple[float | None, float | None] = (None, None),
    size: tuple[int, int] = (540, 220),
    legend: bool = True,
    stacked: bool = False,
) -> Chart | None:
    """Returns a chart of series over one x axis; None if no series has two points, or dots to show.

    `axes` are the titles of the x and the y axis. With `stacked` the series are areas on top of each other,
    the first at the bottom; all of them have the same x values.
    """
    shown = [thinned(one) for one in series if one.points]
    if stacked:
        shown = [replace(one, form="area") for one in shown if any(y for _, y in one.points)]
    if not any(len(one.points) > 1 or "dots" in one.form for one in shown):
        return None
    data = {
        "title": title,
        "axes": axes,
        "y": y_range,
        "size": size,
        "stacked": stacked,
        "series": [
            {"name": one.name, "tone": one.tone, "form": one.form, "points": rounded(one.points)}
            for one in shown
        ],
    }
    names = tuple((one.name, one.tone, one.form) for one in shown) if legend and len(shown) > 1 else ()
    return Chart(title, note, names, json.dumps(data, separators=(",", ":")))


def thinned(series: Series) -> Series:
    """At most MOST_POINTS points: neighbours become their mean (or maximum), at their last x."""
    points = series.points
    if len(points) <= MOST_POINTS:
        return series
    edges = [index * len(points) // MOST_POINTS for index in range(MOST_POINTS + 1)]
    fewer = []
    for start, end in pairwise(edges):
        values = [y for _, y in points[start:end]]
        value = max(values) if series.peak else sum(values) / len(values)
        fewer.append((points[end - 1][0], value))
    return replace(series, points=fewer)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from the interval, some `about` of them: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(one * power for one in (1, 2, 5, 10) if one * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def rounded(points: Sequence[Point]) -> list[Point]:
    """Returns the points with four significant digits of their values."""
    return [(x, float(f"{y:.4g}")) for x, y in points]
