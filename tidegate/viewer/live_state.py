"""State of a view of a run: its messages and metrics so far, with bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from tidegate.viewer.formatting import known
from tidegate.viewer.signs.watch import SignWatch, watch_of_run

KEPT = 2_000
"""Steps whose numbers are kept for trends."""


class Rate:
    """What a growing total comes to a second, over the last `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, clock: float, total: float) -> None:
        if self._seen and total < self._seen[-1][1]:
            self._seen.clear()  # counted anew, as after a restart
        self._seen.append((clock, total))
        while len(self._seen) > 2 and clock - self._seen[1][0] >= self._window:
            self._seen.popleft()

    def per_second(self) -> float | None:
        """None until two totals at different times are known."""
        if not self._seen or self._seen[-1][0] <= self._seen[0][0]:
            return None
        (then, few), (now, many) = self._seen[0], self._seen[-1]
        return (many - few) / (now - then)


@dataclass(slots=True)
class LiveState:
    """`clock` readings are seconds of one monotonic clock."""

    total_steps: int | None
    """Limit of the steps; None without one."""
    bound: int | None
    started_at: float
    _: KW_ONLY
    info: dict[str, object] = field(default_factory=dict)
    news: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=50))
    now: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    trends: dict[str, deque[float]] = field(default_factory=dict)
    first_eval: dict[str, float] = field(default_factory=dict)
    last_eval: dict[str, float] = field(default_factory=dict)
    eval_step: int | None = None
    progress: tuple[str, int, int] | None = None
    """An activity, its completed parts, and the number of its parts."""
    sampled: Rate = field(default_factory=lambda: Rate(10.0))
    ticks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=21))
    signs: SignWatch = field(default_factory=SignWatch)

    @property
    def at(self) -> int:
        """The newest step that was taken."""
        return int(self.last.get("step", 0))

    def start(self, info: Mapping[str, object]) -> list[str]:
        """Enters a start of the run; returns notes on a resumed one, whose signs so far are read."""
        self.info = dict(info)
        if info.get("resumed_from") is None:
            return []
        self.signs = watch_of_run(self.run_dir)
        return [f"resumed from step {info['resumed_from']}"]

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run; None if its start did not tell it."""
        return Path(str(self.info["dir"])) if self.info.get("dir") else None

    def add_state(self, snapshot: Mapping[str, float], clock: float) -> list[str]:
        """Enters the state at `clock`; returns a warning if a sign begins."""
        self.now.update(snapshot)
        total = known(snapshot.get("tokens/sampled_total"))
        if total is not None:
            self.sampled.add(clock, total)
        sign = self.signs.state(snapshot)
        return [] if sign is None else [f"warning: {sign}"]

    def tokens_per_s(self) -> float | None:
        """The reported rate, else one derived from the total of sampled tokens."""
        reported = known(self.now.get("tokens_per_s"))
        return self.sampled.per_second() if reported is None else reported

    def add_step(self, metrics: Mapping[str, float], clock: float) -> list[str]:
        """Enters the metrics of a step; returns warnings of the signs that begin."""
        numbers = {
            key: value for key, value in ((key, known(metrics[key])) for key in metrics) if value is not None
        }
        self.last.update(numbers)
        for key, value in numbers.items():
            self.trends.setdefault(key, deque(maxlen=KEPT)).append(value)
        self.ticks.append((clock, self.at))
        scores = {key: value for key, value in numbers.items() if key.startswith("eval/")}
        if scores:
            self.first_eval = {**scores, **self.first_eval}
            self.last_eval.update(scores)
            self.eval_step = int(scores.get("eval/step", self.at))
        return [f"warning: {sign}" for sign in self.signs.step(numbers)]

    def trend(self, key: str) -> list[float]:
        return list(self.trends.get(key, ()))

    def recent(self, key: str, steps: int = 5) -> float | None:
        """The mean of the last few steps' values."""
        values = self.trend(key)[-steps:]
        return sum(values) / len(values) if values else None

    def seconds_left(self) -> float | None:
        """From the pace of the last 20 steps; None until there is one, or without a limit."""
        if len(self.ticks) < 2 or self.total_steps is None:
            return None
        (then, first), (now, last) = self.ticks[0], self.ticks[-1]
        if last <= first or now <= then:
            return None
        return (now - then) / (last - first) * max(0, self.total_steps - last)
