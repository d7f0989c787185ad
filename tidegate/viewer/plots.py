"""Charts of a run for the report and the dashboard, and `reward.png`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tidegate.observer import GROUP_ENDINGS, GROUP_STAGES
from tidegate.viewer.chart import STEP, Chart, Form, Point, Series, Tone, lines
from tidegate.viewer.formatting import number, printable, smoothed
from tidegate.viewer.held_out import GREEDY, SAMPLED
from tidegate.viewer.run_files import RunFiles

WIDE = (960, 320)
SMALL = (350, 180)


def reward_chart(run: RunFiles) -> Chart | None:
    series = _reward_series(run)
    counts = sorted({int(value) for _, value in run.series("eval/episodes")})
    over = (
        f" Held out: over {' to '.join(map(str, counts[:: max(1, len(counts) - 1)]))} problems."
        if counts
        else ""
    )
    return lines(
        "Reward", series, note=over.strip(), axes=(STEP, "mean reward"), y_range=_unit(series), size=WIDE
    )


def _reward_series(run: RunFiles) -> list[Series]:
    raw = run.series("reward/mean")
    further = {key: name for key, name in run.held_out().items() if key not in (SAMPLED, GREEDY)}
    return [
        Series("each batch", raw, "accent", "thin"),
        Series("training, smoothed", _smooth(raw), "accent"),
        Series("held out, sampled", run.series(SAMPLED), "ink", "dots"),
        Series("held out, greedy", run.series(GREEDY), "muted", "dashdots"),
        *(
            Series(name.removeprefix("held out, "), run.series(key), *style)
            for (key, name), style in zip(further.items(), cycle(FURTHER_STYLES), strict=False)
        ),
    ]


FURTHER_STYLES: tuple[tuple[Tone, Form], ...] = (
    ("sand", "dots"), ("warn", "dots"), ("muted", "dots"),
    ("sand", "dashdots"), ("warn", "dashdots"), ("ink", "dashdots"),
)  # fmt: skip
"""Of evaluation sets and suites."""


def _unit(series: Sequence[Series]) -> tuple[float | None, float | None]:
    """Returns the range 0 to 1 if it includes all values, as with most rewards, so that heights compare."""
    inside = all(0.0 <= y <= 1.0 for line in series for _, y in line.points)
    return (0.0, 1.0) if inside else (None, None)


def _smooth(points: Sequence[Point]) -> list[Point]:
    values = smoothed([y for _, y in points])
    return [(x, value) for (x, _), value in zip(points, values, strict=True)]


def main_charts(run: RunFiles, bound: int | None) -> list[Chart]:
    """Returns the charts of policies, staleness, waiting, throughput and groups that a run has."""
    charts = [_policies(run), _staleness(run, bound), _waiting(run), _throughput(run), _groups(run)]
    return [chart for chart in charts if chart is not None]


POLICY_TONES: tuple[Tone, ...] = ("accent", "sand", "warn", "muted", "ink")


def _policies(run: RunFiles) -> Chart | None:
    """The rewards of several policies, which may have scales of their own."""
    names = {key.split("/")[1] for row in run.rows for key in row if key.startswith("policy/")}
    series = []
    for name, tone in zip(sorted(names), cycle(POLICY_TONES), strict=False):
        series.append(Series(name, _smooth(run.series(f"policy/{name}/reward")), tone))
        series.append(Series(f"{name}, held out", run.series(f"eval/policy/{name}/reward"), tone, "dots"))
    note = "Each policy's own reward with those of its turns, smoothed."
    return lines("Reward by policy", series, note=note, axes=(STEP, "mean reward"), y_range=_unit(series))


def _staleness(run: RunFiles, bound: int | None) -> Chart | None:
    largest = run.series("staleness/max")
    series = [
        Series("mean", run.series("staleness/mean"), "accent"),
        Series("max", largest, "muted", "thin", peak=True),
    ]
    if bound is not None and largest:
        series.append(Series("bound", [(largest[0][0], bound), (largest[-1][0], bound)], "warn", "dash"))
    note = "Versions between a group's oldest token and the step that trained on it."
    return lines("Staleness", series, note=note, axes=(STEP, "policy versions"), y_range=(0.0, None))


def _waiting(run: RunFiles) -> Chart | None:
    series = [
        Series("trainer waits for data", run.series("time/wait_for_batch"), "accent"),
        Series("data waits for the trainer", run.series("time/batch_queue"), "sand"),
        Series("whole step", run.series("time/step"), "muted", "thin"),
    ]
    return lines("Waiting times", series, axes=(STEP, "seconds per step"), y_range=(0.0, None))


def _throughput(run: RunFiles) -> Chart | None:
    rows = [row for row in run.rows if "tokens/trained" in row and row.get("time/step", 0.0) > 0]
    series = [
        Series("sampled", run.sampling_rate(), "accent"),
        Series(
            "trained on", [(row["step"], row["tokens/trained"] / row["time/step"]) for row in rows], "sand"
        ),
    ]
    return lines("Tokens per second", series, axes=(STEP, "tokens per second"), y_range=(0.0, None))


def _groups(run: RunFiles) -> Chart | None:
    """Each issued group is in exactly one area, by its state in the ledger."""
    rows = [row for row in run.rows if any(f"groups/{state}" in row for state in GROUP_ENDINGS)]

    def count(name: str, *keys: str, tone: Tone) -> Series:
        points = [(row["step"], sum(row.get(f"groups/{key}", 0.0) for key in keys)) for row in rows]
        return Series(name, points, tone)

    series = [
        count("trained", "trained", "stepped", tone="accent"),
        count("filtered (no variance)", "filtered", tone="muted"),
        count("stale", "stale", tone="sand"),
        count("failed, cancelled", "failed", "cancelled", tone="warn"),
        count("in flight", *GROUP_STAGES, tone="ink"),
    ]
    axes = (STEP, "groups since the start")
    return lines("Groups by state", series, axes=axes, y_range=(0.0, None), stacked=True)


HEALTH = {
    "entropy": ("Entropy", "", "nats per token"),
    "mismatch_kl": ("Mismatch KL", "engine against trainer, same version", "nats per token"),
    "lag_kl": ("Lag KL", "sampling policy against the current one", "nats per token"),
    "logprob_drift": ("Drift", "of the sampled tokens' logprobs", "nats per token"),
    "unlisted_mass": ("Probability outside the listed ids", "with score centering", "probability"),
    "centered_fraction": ("Centered tokens", "", "share of tokens"),
    "loss": ("Loss", "", ""),
    "validation/loss": ("Validation loss", "of fine-tuning", "nats per token"),
    "grad_norm": ("Gradient norm", "before clipping", ""),
    "clip_fraction": ("Capped importance ratios", "", "share of tokens"),
    "ess": ("Effective sample size", "", "share of tokens"),
    "weight_version/mixed_turn_ratio": ("Turns across a publish", "", "share of turns"),
    "reward/std": ("Reward spread", "", "standard deviation"),
    "reward/zero_variance_ratio": ("Groups with equal rewards", "", "share of groups"),
    "repetition/mean": ("Repetition", "repeated 4-grams", "share of 4-grams"),
    "length/mean": ("Episode length", "", "sampled tokens"),
    "length/cut_ratio": ("Cut at a token limit", "", "share of episodes"),
    "turns/mean": ("Turns", "", "per episode"),
    "tool_calls/mean": ("Tool calls", "", "per episode"),
}
"""Metrics with a small chart: title, note, unit."""


def health_charts(run: RunFiles) -> list[Chart]:
    """Returns small charts of the single metrics that the run has."""
    charts = []
    for key, (title, note, unit) in HEALTH.items():
        series = _with_trend(run, key)
        charts.append(lines(title, series, note=note, axes=(STEP, unit), size=SMALL, legend=False))
    for key in (*_custom_keys(run), *_policy_keys(run)):
        series, axes = _with_trend(run, key), (STEP, "mean over the batch")
        charts.append(
            lines(printable(key), series, axes=axes, y_range=_unit(series), size=SMALL, legend=False)
        )
    return [chart for chart in charts if chart is not None]


def _custom_keys(run: RunFiles) -> list[str]:
    """Returns the metrics that rewards and agents report, and the parts of the reward."""
    keys = {key for row in run.rows for key in row if key.startswith(("reward/", "episode/"))}
    return sorted(keys - {"reward/mean", "reward/std"} - {key for key in keys if key.endswith("_ratio")})


def _policy_keys(run: RunFiles) -> list[str]:
    """Returns the metrics of single policies that show how they learn."""
    shown = ("/entropy", "/mismatch_kl", "/staleness/max")
    return sorted(
        {key for row in run.rows for key in row if key.startswith("policy/") and key.endswith(shown)}
    )


def _with_trend(run: RunFiles, key: str) -> list[Series]:
    raw = run.series(key)
    return [Series("step", raw, "accent", "thin"), Series("smoothed", _smooth(raw), "accent")]


def write_reward_png(run: RunFiles, path: Path) -> bool:
    """Draws reward and held-out reward by step; returns False if matplotlib is not installed.

    matplotlib is imported here because importing it takes a second.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(9, 5), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    series = [one for one in _reward_series(run) if one.points]
    for one in series:
        axes.plot(*zip(*one.points, strict=True), color=COLORS[one.tone], label=one.name, **STYLES[one.form])
    if series and _unit(series) != (None, None):
        axes.set_ylim(0, 1.02)
    _label(axes, run)
    figure.savefig(path)
    return True


COLORS: dict[Tone, str] = {
    "accent": "#0b7285",
    "ink": "#1f2933",
    "sand": "#c2803a",
    "muted": "#8a94a0",
    "warn": "#c2413a",
}
STYLES: dict[Form, dict[str, Any]] = {
    "thin": {"alpha": 0.28, "linewidth": 1},
    "line": {"linewidth": 2.2},
    "dots": {"marker": "o", "linewidth": 1.3},
    "dashdots": {"marker": "s", "linestyle": "--", "linewidth": 1.3},
}


def _label(axes: Any, run: RunFiles) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(_title(run), loc="left", fontsize=12, weight="bold", color=COLORS["ink"])
    axes.grid(axis="y", color="#e5e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.has_data():
        axes.legend(frameon=False, loc="lower right", fontsize=9)


def _title(run: RunFiles) -> str:
    name = str(run.settings.get("run", {}).get("name", run.dir.name))
    held = run.series("eval/reward")
    # matplotlib reads text between dollar signs as a formula.
    text = f"{name}: held-out reward {number(held[0][1])} → {number(held[-1][1])}" if len(held) > 1 else name
    return text.replace("$", r"\$")
