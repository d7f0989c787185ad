"""A mean with its confidence interval, of values that are counted one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tidegate.evaluation.stats import student, wilson


@dataclass(slots=True)
class RunningMean:
    """Counts values in constant memory and time (Welford 1962, Technometrics 4:419)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared deviations from the mean."""
    ones: int = 0
    """Number of values that are 1."""
    binary: bool = True
    """Whether all values are 0 or 1."""
    least: float = math.inf
    largest: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)
        self.ones += value == 1.0
        self.binary = self.binary and value in (0.0, 1.0)
        self.least, self.largest = min(self.least, value), max(self.largest, value)

    @classmethod
    def of(cls, parts: Iterable[RunningMean]) -> RunningMean:
        """Returns the mean of the values of all parts (Chan, Golub and LeVeque 1979)."""
        joined = cls()
        for part in parts:
            total, apart = joined.count + part.count, part.mean - joined.mean
            if total:
                joined.squares += part.squares + apart**2 * joined.count * part.count / total
                joined.mean += apart * part.count / total
            joined.count, joined.ones = total, joined.ones + part.ones
            joined.binary = joined.binary and part.binary
            joined.least = min(joined.least, part.least)
            joined.largest = max(joined.largest, part.largest)
        return joined

    def interval(self) -> tuple[float, float] | None:
        """Returns the interval of the mean; None where it cannot be computed.

        Wilson's score interval if all values are 0 or 1, also of a single one; else Student's t. One value
        that is neither, or several that are equal, do not show their spread.
        """
        if self.count and self.binary:
            return wilson(self.ones, self.count)
        if self.count < 2 or self.least == self.largest:
            return None
        return student(self.mean, self.squares / (self.count - 1), self.count)

    def to_wire(self) -> dict[str, Any]:
        low, high = self.interval() or (None, None)
        mean = self.ones / self.count if self.count and self.binary else self.mean
        return {"count": self.count, "mean": mean if self.count else None, "low": low, "high": high}
