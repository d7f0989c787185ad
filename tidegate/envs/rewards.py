"""Reward functions, and how they ask for what they need: by the names of their arguments."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from tidegate.errors import ConfigError, RewardError
from tidegate.tracebacks import where

ARGUMENTS = ("output", "answer", "info", "task", "messages", "trajectory")
"""What a reward function may ask for; it gets those it names, and nothing else."""

# Possessive all along: a flood of blanks or digits takes time in proportion to its length.
_NUMBER = r"-?\s*+\$?\s*+(?:[0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)"
# What follows must not make it another number: 1/2, 1e5 and 1.2.3 are none of ours.
_FINAL = re.compile(rf"####\s*+({_NUMBER})(?![./][0-9]|[eE][+-]?[0-9])")


@dataclass(frozen=True, slots=True)
class Grade:
    """A reward with a word on how it came about: `metrics` are kept with the episode."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """One named part of a reward: `weight` × `fn(…)`.

    `fn` is pure and returns a finite number (or a bool), or a `Grade`. Raises ConfigError where it asks
    for an argument that is not among ARGUMENTS.
    """

    name: str
    fn: Callable[..., float | Grade]
    weight: float = 1.0

    def __post_init__(self) -> None:
        unknown = [name for name in _asked(self.fn) if name not in ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"the reward {self.name!r} asks for {', '.join(map(repr, unknown))}; "
                f"a reward function may ask for {', '.join(ARGUMENTS)}"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"the reward {self.name!r} has the weight {self.weight}; it must be finite")

    def __call__(self, given: Mapping[str, Any]) -> float:
        """The unweighted value; raises RewardError where the function raises or gives no finite number."""
        return self.grade(given).value

    def grade(self, given: Mapping[str, Any]) -> Grade:
        """The unweighted value with its metrics; raises RewardError as a call does."""
        try:
            found: Any = self.fn(**{name: given[name] for name in _asked(self.fn)})
        except RewardError as error:
            raise RewardError(f"the reward {self.name!r}: {error}") from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}{where(error)}"
            raise RewardError(f"the reward {self.name!r} raised {what}") from error
        value, metrics = (found.value, found.metrics) if isinstance(found, Grade) else (found, {})
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"the reward {self.name!r} returned {value!r}, not a finite number")
        return Grade(float(value), metrics)


def _asked(fn: Callable[..., float | Grade]) -> list[str]:
    """The arguments that a function must be given; those with a default of their own only if known."""
    asked = []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in ARGUMENTS or parameter.default is parameter.empty:
            asked.append(name)
    return asked


def final_number(text: str | None) -> Decimal | None:
    """The number of the last `#### number` in a text, GSM8K's way to state an answer; None without one.

    Exact: no floats. Commas, `$` and `%` are tolerated: `#### $1,234.50` is 1234.5.
    """
    found = _FINAL.findall(text or "")
    return Decimal(re.sub(r"[\s$,]", "", found[-1])) if found else None


def exact_answer(output: str | None, answer: Any) -> float:
    """1 where the last `#### number` of the output equals the answer's, compared as decimals; else 0.

    An answer without `####` is the number itself; a list of answers has any of them. Raises RewardError
    where one holds no number.
    """
    said = final_number(output)
    golds = [_stated(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])]
    return float(said is not None and said in golds)


def _stated(answer: str) -> Decimal:
    found = final_number(answer if "####" in answer else f"#### {answer}")
    if found is None:
        raise RewardError(f"the answer {answer[:80]!r} holds no number")
    return found
