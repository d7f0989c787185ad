"""Follows a run and reports when a sign begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate.viewer.formatting import known, number
from tidegate.viewer.run_files import lineage, objects
from tidegate.viewer.signs.history import WINDOW, MetricHistory
from tidegate.viewer.signs.rules import FILTERED, RULES, Sign, remedy_of_equal_groups

MANY = 100
"""Groups filtered since the newest step, without which nothing is said before the next one."""
FEW = 0.05
"""Share of groups with different rewards among those that ended since the newest step."""


@dataclass(slots=True)
class HeldSign:
    """A sign with the steps at which its condition held."""

    sign: Sign
    since: int
    until: int
    """The newest step at which it held."""

    def to_wire(self) -> dict[str, Any]:
        return {**asdict(self.sign), "since": self.since, "until": self.until}


class SignWatch:
    """The signs of a run so far.

    A sign ends when its condition has not held for WINDOW steps, so that one at its threshold is reported
    once.
    """

    def __init__(self) -> None:
        self.history = MetricHistory()
        self.current: dict[str, HeldSign] = {}
        self.past: list[HeldSign] = []
        self._last: dict[str, float] = {}
        self._waiting = False
        """Whether the groups filtered since the newest step were reported."""

    def step(self, metrics: Mapping[str, object]) -> list[Sign]:
        """Adds the metrics of a step; returns the signs that begin with it."""
        before = self.history.step
        self.history.add(metrics)
        step = self.history.step
        if step < before:
            self._go_back(step)
        self._last |= {key: value for key in metrics if (value := known(metrics[key])) is not None}
        self._waiting = False
        held = [sign for rule in RULES if (sign := rule(self.history)) is not None]
        begun = [sign for sign in held if self._hold(sign, step)]
        for name in [name for name, one in self.current.items() if step - one.until >= WINDOW]:
            self.past.append(self.current.pop(name))
        return begun

    def state(self, snapshot: Mapping[str, object]) -> Sign | None:
        """Returns a sign if hardly any group that ended since the newest step has different rewards.

        A run whose groups are all filtered takes no step, so its metrics do not show it.
        """
        filtered, solved, failed, cut = self._filtered(snapshot)
        useful = known(snapshot.get("groups/leased")) or 0.0
        if self._waiting or filtered < MANY or useful > FEW * (filtered + useful):
            return None
        self._waiting = True
        sign = Sign(
            FILTERED, "groups/filtered",
            f"{self.filtered(snapshot)}; {number(useful, 0)} can be trained on",
            f"{MANY} filtered, at most {number(100 * FEW, 0)}% with different rewards",
            remedy_of_equal_groups(solved, failed, cut),
        )  # fmt: skip
        return sign if self._hold(sign, max(0, self.history.step)) else None

    def filtered(self, snapshot: Mapping[str, object]) -> str:
        """Returns how many groups were filtered since the newest step, and why; empty if there are none."""
        filtered, solved, failed, cut = self._filtered(snapshot)
        if not filtered:
            return ""
        others = filtered - solved - failed
        return (
            f"{number(filtered, 0)} group{'' if filtered == 1 else 's'} filtered "
            f"since step {max(0, self.history.step)}: "
            f"{number(solved, 0)} all solved, {number(failed, 0)} all failed"
            + (f" ({number(cut, 0)} with every reply cut at a token limit)" if cut else "")
            + (f", {number(others, 0)} with other equal rewards or by trainer.filter" if others > 0 else "")
        )

    def _filtered(self, snapshot: Mapping[str, object]) -> tuple[float, ...]:
        """Returns the numbers since the newest step: filtered, all solved, all failed, all cut."""
        keys = [f"groups/filtered{reason}" for reason in ("", "_solved", "_failed", "_cut")]
        last = [self._last.get(key, 0.0) for key in keys]
        now = [
            before if (value := known(snapshot.get(key))) is None else value
            for key, before in zip(keys, last, strict=True)
        ]
        return tuple(after - before for after, before in zip(now, last, strict=True))

    def newest(self, key: str) -> float | None:
        """Returns the newest value of a metric; None if there was none."""
        return self._last.get(key)

    def _hold(self, sign: Sign, step: int) -> bool:
        """Enters that a sign holds; returns whether it begins."""
        held = self.current.get(sign.name)
        if held is None:
            self.current[sign.name] = HeldSign(sign, step, step)
            return True
        held.sign, held.until = sign, step
        return False

    def _go_back(self, step: int) -> None:
        """Drops signs of steps that a resumed run takes again."""
        self.past = [held for held in self.past if held.since < step]
        self.current = {name: held for name, held in self.current.items() if held.since < step}


def watch_of_run(run_dir: Path | None) -> SignWatch:
    """Returns the signs of the steps in a run's directory; of none if there is no file of metrics."""
    path = None if run_dir is None else run_dir / "metrics.jsonl"
    return watch_of(() if path is None or not path.exists() else lineage(objects(path)))


def watch_of(rows: Iterable[Mapping[str, object]]) -> SignWatch:
    """Returns the signs of the steps of a run."""
    watch = SignWatch()
    for row in rows:
        watch.step(row)
    return watch
