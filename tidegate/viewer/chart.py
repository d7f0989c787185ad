"""Line and area charts as SVG with the page's colours, for light and dark modes.

Nothing here draws text that came from a model or an agent; what is passed is escaped all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Literal

from markupsafe import Markup, escape

Point = tuple[float, float]
Tone = Literal["accent", "ink", "muted", "sand", "warn"]
Form = Literal["line", "thin", "dash", "dots", "dashdots", "area"]

MOST_POINTS = 300
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 24, 40
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
    """A figure: the drawing, its legend as (name, colour, shape), and `data`, JSON from which report.js draws
    it at the width of the page."""

    title: str
    note: str
    svg: Markup
    legend: tuple[tuple[str, str, str], ...]
    data: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a chart's series are drawn."""

    axes: tuple[str, str]
    y: tuple[float | None, float | None]
    size: tuple[int, int]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Where data lies in a drawing of `width` × `height` units."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, point: Point) -> str:
        return f"{self.across(point[0]):.1f},{self.up(point[1]):.1f}"

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (self.width - LEFT - RIGHT)

    def up(self, value: float) -> float:
        low, high = self.y
        return self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    axes: tuple[str, str] = (STEP, ""),
    y_range: tuple[float | None, float | None] = (None, None),
    size: tuple[int, int] = (540, 220),
    legend: bool = True,
) -> Chart | None:
    """Returns a chart of series over one x axis; None if no series has two points, or dots to show.

    `axes` are the titles of the x and the y axis.
    """
    shown = [thinned(one) for one in series if one.points]
    if not any(len(one.points) > 1 or "dots" in one.form for one in shown):
        return None
    frame = _frame(shown, y_range, size)
    body = [_axes(frame, axes), *(_drawn(one, frame) for one in shown)]
    return _chart(title, note, frame, body, shown, Drawing(axes, y_range, size), legend)


def stacked(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    axes: tuple[str, str] = (STEP, ""),
    size: tuple[int, int] = (540, 220),
) -> Chart | None:
    """Returns areas on top of each other, the first at the bottom; all series have the same x values."""
    shown = [thinned(one) for one in series if any(y for _, y in one.points)]
    if not shown or len(shown[0].points) < 2:
        return None
    floor = [0.0] * len(shown[0].points)
    areas: list[tuple[Series, list[Point], list[Point]]] = []
    for one in shown:
        top = [low + y for low, (_, y) in zip(floor, one.points, strict=True)]
        xs = [x for x, _ in one.points]
        areas.append((one, list(zip(xs, floor, strict=True)), list(zip(xs, top, strict=True))))
        floor = top
    total = [Series("", areas[-1][2])]
    frame = _frame(total, (0.0, None), size)
    body = [_axes(frame, axes)]
    for one, low, high in areas:
        path = " ".join(frame.at(point) for point in [*high, *low[::-1]])
        body.append(Markup('<polygon class="area {}" points="{}"/>').format(one.tone, path))
    drawing = Drawing(axes, (0.0, None), size, stacked=True)
    return _chart(title, note, frame, body, [replace(one, form="area") for one in shown], drawing)


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


def _frame(
    series: Sequence[Series], y_range: tuple[float | None, float | None], size: tuple[int, int]
) -> PlotArea:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    low = min(ys) if y_range[0] is None else min(y_range[0], *ys)
    high = max(ys) if y_range[1] is None else max(y_range[1], *ys)
    if high - low < 1e-12:
        largest = max(abs(low), abs(high))
        around = largest / 2 if largest > 1e-12 else 0.5
        low, high = low - around, high + around
    margin = (high - low) * 0.06
    high += margin if y_range[1] is None or high > y_range[1] else (high - low) * 0.02
    low -= margin if y_range[0] is None or low < y_range[0] else 0.0
    left, right = min(xs), max(xs)
    return PlotArea(*size, (left, right if right > left else left + 1.0), (low, high))


def _axes(frame: PlotArea, titles: tuple[str, str]) -> Markup:
    parts = [
        Markup('<text class="title" x="0" y="11">{}</text>').format(titles[1]),
        Markup('<text class="title end" x="{}" y="{}">{}</text>').format(
            frame.width - RIGHT, frame.height - 3, titles[0]
        ),
    ]
    for value in ticks(*frame.y, about=5 if frame.height > 200 else 3):
        y = f"{frame.up(value):.1f}"
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                LEFT, frame.width - RIGHT, y, y
            )
        )
        parts.append(
            Markup('<text class="tick end" x="{}" y="{}" dy="4">{}</text>').format(LEFT - 7, y, label(value))
        )
    for value in ticks(*frame.x, about=max(3, frame.width // 100)):
        x = f"{frame.across(value):.1f}"
        parts.append(
            Markup('<text class="tick mid" x="{}" y="{}">{}</text>').format(
                x, frame.height - 22, label(value)
            )
        )
    return Markup("").join(parts)


def label(value: float) -> str:
    """Returns a tick's text: `0.25`, `1,500`, `2e−6`, `3.2M`."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size >= 1e6:
        text = f"{value / 1e6:g}M"
    elif size >= 1000:
        text = f"{value:,.0f}"
    elif size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def _drawn(series: Series, frame: PlotArea) -> Markup:
    path = " ".join(frame.at(point) for point in series.points)
    out = Markup('<polyline class="{} {}" points="{}"/>').format(series.form, series.tone, path)
    if "dots" in series.form:
        for point in series.points:
            x, y = frame.at(point).split(",")
            out += Markup('<circle class="dot {}" cx="{}" cy="{}" r="4"/>').format(series.tone, x, y)
    return out


def _chart(
    title: str,
    note: str,
    frame: PlotArea,
    body: Sequence[Markup],
    series: Sequence[Series],
    drawing: Drawing,
    legend: bool = True,
) -> Chart:
    svg = Markup('<svg viewBox="0 0 {w} {h}" role="img" aria-label="{title}">{body}</svg>').format(
        w=frame.width,
        h=frame.height,
        title=escape(title),
        body=Markup("").join(body),
    )
    data = {
        "title": title,
        **asdict(drawing),
        "series": [
            {"name": one.name, "tone": one.tone, "form": one.form, "points": rounded(one.points)}
            for one in series
        ],
    }
    names = tuple((one.name, one.tone, one.form) for one in series) if legend and len(series) > 1 else ()
    return Chart(title, note, svg, names, json.dumps(data, separators=(",", ":")))


def rounded(points: Sequence[Point]) -> list[Point]:
    """Returns the points with four significant digits of their values."""
    return [(x, float(f"{y:.4g}")) for x, y in points]
