"""Compares scenarios with different ratios of engines to trainers and staleness bounds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.program import advise_extra
from tidegate.simulation.outcome import Figures
from tidegate.simulation.scenario import Scenario
from tidegate.simulation.world import SimulatedRun

Bound = int | None
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Cell:
    """One scenario of a sweep with its figures."""

    engines: int
    trainers: int
    staleness: Bound
    figures: Figures

    @classmethod
    def of(cls, scenario: Scenario) -> Cell:
        """Simulates a scenario."""
        bound, figures = scenario.rules.max_staleness, SimulatedRun(scenario).run()
        return cls(scenario.engine_count, scenario.trainer.count, bound, figures)


def scenarios(
    scenario: Scenario, splits: Sequence[tuple[int, int]], bounds: Sequence[Bound]
) -> list[Scenario]:
    """Returns the scenario with every split (engines, trainers) and every staleness bound, in this order."""
    return [
        scenario.with_(engine={"count": engines}, trainer={"count": trainers}, rules={"max_staleness": bound})
        for engines, trainers in splits
        for bound in bounds
    ]


def splits_of(accelerators: int, parts: int = 8) -> list[tuple[int, int]]:
    """Returns ways to divide `accelerators` between engines and trainers, in up to `parts` equal steps."""
    step = max(1, accelerators // parts)
    return [(accelerators - trainers, trainers) for trainers in range(step, accelerators, step)]


def table(cells: Sequence[Cell]) -> str:
    """Formats a table; `vs sync` is the throughput relative to staleness 0 of the same split."""
    best = max(cells, key=lambda one: one.figures.trained_tokens_per_s)
    synchronous = {one.engines: one.figures.trained_tokens_per_s for one in cells if one.staleness == 0}
    lines = [
        f"{'engines':>8}{'trainers':>9}{'staleness':>10}{'tokens/s':>11}{'vs sync':>8}{'step':>9}"
        f"{'goodput':>8}{'mean':>6}{'max':>4}{'engines':>8}{'trainer':>8}",
        f"{'':>8}{'':>9}{'bound':>10}{'trained':>11}{'':>8}{'s':>9}{'':>8}{'stal.':>6}{'':>4}{'busy':>8}{'waits':>8}",
    ]
    for one in cells:
        found, base = one.figures, synchronous.get(one.engines)
        bound = "none" if one.staleness is None else str(one.staleness)
        ratio = f"{found.trained_tokens_per_s / base:.2f}x" if base else ""
        lines.append(
            f"{one.engines:>8}{one.trainers:>9}{bound:>10}{found.trained_tokens_per_s:>11,.0f}{ratio:>8}"
            f"{found.step_s:>9.2f}{found.goodput:>8.3f}{found.staleness_mean:>6.2f}{found.staleness_max:>4}"
            f"{found.engines_busy:>8.2f}{found.trainer_waits:>8.2f}{'  best' if one is best else ''}"
        )
    return "\n".join(lines)


def check_plot(path: Path) -> None:
    """Raises ConfigError if a plot cannot be written to the path."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {advise_extra('train')}")
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such directory")


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Plots throughput and goodput over splits, one line per bound, or over the bounds of a single split."""
    from matplotlib.figure import Figure  # an extra; slow to import

    splits = list(dict.fromkeys((one.engines, one.trainers) for one in cells))
    bounds = list(dict.fromkeys(one.staleness for one in cells))
    by_split = len(splits) > 1
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = ["none" if bound is None else str(bound) for bound in bounds]
    charts: list[tuple[Any, Callable[[Cell], float], str]] = [
        (left, lambda one: one.figures.trained_tokens_per_s, "trained tokens per second"),
        (right, lambda one: one.figures.goodput, "goodput: trained ÷ sampled tokens"),
    ]
    for axes, read, title in charts:
        if by_split:
            for bound, name in zip(bounds, names, strict=True):
                line = [one for one in cells if one.staleness == bound]
                axes.plot([one.engines for one in line], [read(one) for one in line], "o-", label=name)
            axes.set_xlabel(f"engines of {sum(splits[0])} accelerators; the others train")
            axes.legend(title="max_staleness", frameon=False)
        else:
            axes.plot(names, [read(one) for one in cells], "o-")
            axes.set_xlabel("max_staleness")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
