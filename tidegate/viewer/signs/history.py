"""Values of the metrics that signs are computed from, step by step."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.viewer.formatting import known

WINDOW = 10
"""Steps over which a metric is averaged."""
MOST_EARLIER = 100
KEPT = (
    "entropy", "repetition/mean", "length/mean", "reward/mean", "reward/std", "reward/zero_variance_ratio",
    "length/cut_ratio", "reward/all_solved_ratio", "reward/all_failed_ratio", "judge/agreement",
    "judge/diverging", "selection/filtered_groups", "lag_kl", "staleness/mean",
    "mismatch_kl", "logprob_drift", "clip_fraction",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Window:
    """Mean of a metric over WINDOW steps, with the standard error of the mean."""

    mean: float
    error: float
    start: int
    end: int
    """The first and the last step."""

    @property
    def steps(self) -> str:
        return f"steps {self.start}–{self.end}"


@dataclass(frozen=True, slots=True)
class EvaluationPair:
    """Mean of two consecutive evaluations, with its standard error."""

    mean: float
    error: float
    start: int
    end: int

    @property
    def steps(self) -> str:
        return f"after steps {self.start} and {self.end}"


@dataclass(slots=True)
class MetricSeries:
    """The values of one metric, and their windows that share no step, the oldest first."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        if self.steps and self.steps[-1] == step:
            self.cut(step)
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) % WINDOW == 0:
            self.windows.append(self.window(len(self.values)))

    def cut(self, step: int) -> None:
        """Drops the values from a step on."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:], self.windows[at // WINDOW :]

    def window(self, end: int) -> Window:
        """Returns the window of the WINDOW values before position `end`."""
        values = self.values[end - WINDOW : end]
        mean = sum(values) / WINDOW
        variance = sum((value - mean) ** 2 for value in values) / (WINDOW - 1)
        return Window(mean, math.sqrt(variance / WINDOW), self.steps[end - WINDOW], self.steps[end - 1])


class EvaluationSeries:
    """One held-out reward: the pairs of its consecutive evaluations, the oldest first.

    The error of a pair is that of rewards between 0 and 1 while all means are, else that of training rewards.
    """

    def __init__(self) -> None:
        self._scores: list[tuple[int, float, float]] = []
        """Evaluated step, mean and number of episodes."""
        self._unit = True
        self.pairs: list[EvaluationPair] = []
        self._best: list[EvaluationPair] = []
        """For each pair the best of those up to it."""

    def add(self, step: int, mean: float, episodes: float, spread: float | None) -> None:
        """Adds an evaluation; `spread` is the standard deviation of training rewards, None if unknown."""
        if self._scores and self._scores[-1][0] >= step:
            self.cut(step)
        self._scores.append((step, mean, episodes))
        unit, self._unit = self._unit, self._unit and 0 <= mean <= 1
        if unit and not self._unit:
            self.pairs, self._best = [], []
        if len(self._scores) > 1 and (self._unit or spread is not None):
            pair = _pair(self._scores[-2], self._scores[-1], None if self._unit else spread)
            self.pairs.append(pair)
            self._best.append(max([*self._best[-1:], pair], key=lambda one: one.mean))

    def cut(self, step: int) -> None:
        """Drops the evaluations from a step on."""
        self._scores = [score for score in self._scores if score[0] < step]
        self.pairs = [pair for pair in self.pairs if pair.end < step]
        del self._best[len(self.pairs) :]

    def best(self) -> EvaluationPair | None:
        """Returns the best pair that shares no evaluation with the newest one."""
        return self._best[-3] if len(self._best) > 2 else None


class MetricHistory:
    """Keeps the series of metrics. A step below its predecessor's drops the steps from it on."""

    def __init__(self) -> None:
        self._series = {key: MetricSeries() for key in KEPT}
        self.held_out: dict[str, EvaluationSeries] = {}
        self.step = -1

    def add(self, row: Mapping[str, object]) -> None:
        """Adds the metrics of a step, or further ones of the newest step."""
        step = known(row.get("step"))
        if step is None:
            return
        if step < self.step:
            self._go_back(int(step))
        self.step = int(step)
        for key in row:
            if is_of_policy(key):
                self._series.setdefault(key, MetricSeries())
        for key, series in self._series.items():
            if (value := known(row.get(key))) is not None:
                series.add(self.step, value)
        self._add_evaluations(row)

    def _add_evaluations(self, row: Mapping[str, object]) -> None:
        of = known(row.get("eval/step"))
        spread = self.last("reward/std")
        for key in row:
            if is_held_out(key) and (value := known(row[key])) is not None:
                episodes = known(row.get(key.removesuffix("reward") + "episodes")) or 1.0
                evaluations = self.held_out.setdefault(key, EvaluationSeries())
                evaluated = self.step if of is None else int(of)
                evaluations.add(evaluated, value, episodes, None if spread is None else spread.mean)

    def _go_back(self, step: int) -> None:
        for series in self._series.values():
            series.cut(step)
        for evaluations in self.held_out.values():
            evaluations.cut(step)

    def policy_rewards(self) -> list[str]:
        """Returns the keys of the rewards of several policies."""
        return sorted(filter(is_of_policy, self._series))

    def first(self, key: str) -> Window | None:
        """Returns the first window; None until a second one that shares no step with it is complete."""
        windows = self._series[key].windows
        return windows[0] if len(windows) > 1 else None

    def last(self, key: str, back: int = 0) -> Window | None:
        """Returns the newest window, or the one `back` windows before.

        None if it is not complete, or if the metric has not been reported for WINDOW steps.
        """
        series = self._series[key]
        end = len(series.values) - back * WINDOW
        return series.window(end) if end >= WINDOW and self.step - series.steps[-1] < WINDOW else None

    def until(self, key: str, step: int) -> Window | None:
        """Returns the newest window whose steps do not exceed `step`."""
        series = self._series[key]
        end = bisect_right(series.steps, step)
        return series.window(end) if end >= WINDOW else None

    def earlier(self, key: str) -> Sequence[Window]:
        """Returns windows that share no step with each other or with the newest one, the oldest first.

        Of a long run they are at most MOST_EARLIER, evenly spread.
        """
        series = self._series[key]
        end = max(0, len(series.values) - WINDOW) // WINDOW
        return series.windows[: end : 1 + end // MOST_EARLIER]

    def newest(self, key: str) -> float | None:
        """Returns the value at the newest step."""
        series = self._series[key]
        return series.values[-1] if series.steps[-1:] == [self.step] else None


def is_of_policy(key: str) -> bool:
    """Whether it is the reward of one of several policies."""
    return key.startswith("policy/") and key.endswith("/reward")


def is_held_out(key: str) -> bool:
    """Whether it is the mean reward of evaluations that are repeated during the run."""
    return key == "eval/reward" or (key.startswith("eval/") and key.endswith("/reward"))


def _pair(
    first: tuple[int, float, float], second: tuple[int, float, float], spread: float | None
) -> EvaluationPair:
    """`spread` is the standard deviation of single rewards; None: they lie between 0 and 1."""
    variance = 0.0
    for _, mean, count in (first, second):
        variance += _most_variance(mean, count) if spread is None else spread**2 / count
    return EvaluationPair((first[1] + second[1]) / 2, math.sqrt(variance) / 2, first[0], second[0])


def _most_variance(mean: float, count: float) -> float:
    """Returns the largest variance of a mean of rewards between 0 and 1: that of rewards that are 0 or 1.

    With one success and one failure added, because the variance at a mean of 0 or 1 is not known to be 0.
    """
    share = (mean * count + 1) / (count + 2)
    return share * (1 - share) / count
