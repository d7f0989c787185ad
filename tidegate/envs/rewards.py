"""Reward functions. They receive the values that their parameters name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from tidegate.envs.answers import EXTRACTORS
from tidegate.envs.unavailable import is_unavailable
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError
from tidegate.tracebacks import where
from tidegate.types import finite, finite_by_name

ARGUMENTS = ("output", "answer", "info", "task", "messages", "trajectory", "state")
"""Parameter names that a reward function may have."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Return value of a reward function that also reports metrics."""

    value: float
    """The reward before weighting."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Recorded with the episode, such as which extractor read the answer."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One named part of an episode's reward: `weight` × `fn(…)`.

    Raises:
        ConfigError: `fn` has a parameter that is not in ARGUMENTS, or `weight` is not finite.
    """

    name: str
    """Name of the part in records and metrics (`reward/<name>`)."""
    fn: Callable[..., float | Grade | Awaitable[float | Grade]]
    """A function with parameters from ARGUMENTS that returns a finite number, a bool (numpy's and torch's
    scalars count) or a `Grade`. It may be async; if it is not, it is called in a thread. It is pure, or
    depends on the episode's `state` alone."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    policy: str | None = None
    """Name of the only policy for which it counts; None: it counts for every policy."""

    def __post_init__(self) -> None:
        unknown = [name for name in _parameters(self.fn) if name not in ARGUMENTS]
        if unknown:
            raise ConfigError(
                f"the reward {self.name!r} has unknown parameters: {', '.join(map(repr, unknown))}; "
                f"a reward function may have {', '.join(ARGUMENTS)}"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"the reward {self.name!r} has the weight {self.weight}; it must be finite")

    def __call__(self, arguments: Mapping[str, Any]) -> float:
        """Returns the unweighted value. Arguments and exceptions are those of `grade`."""
        return self.grade(arguments).value

    def grade(self, arguments: Mapping[str, Any]) -> Grade:
        """Calls the function.

        Args:
            arguments: A value for each of ARGUMENTS; the function receives those that it names.

        Returns:
            The unweighted value with its metrics.

        Raises:
            RewardUnavailableError: The function raised because a service did not respond (`is_unavailable`).
            RewardError: It raised otherwise or did not return a finite number.
        """
        try:
            return self._checked(self.fn(**self._selected(arguments)))
        except Exception as error:
            raise self._described(error) from error

    async def grade_async(self, arguments: Mapping[str, Any]) -> Grade:
        """Awaits an async function. Arguments, result and exceptions are those of `grade`."""
        try:
            result: Any = self.fn(**self._selected(arguments))
            return self._checked(await result)
        except Exception as error:
            raise self._described(error) from error

    @property
    def is_async(self) -> bool:
        return is_async(self.fn)

    @property
    def needs_state(self) -> bool:
        return "state" in _parameters(self.fn)

    def _selected(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: arguments[name] for name in _parameters(self.fn)}

    def _checked(self, result: Any) -> Grade:
        value, metrics = (result.value, result.metrics) if isinstance(result, Grade) else (result, {})
        checked = finite_by_name("its metric ", metrics)
        return Grade(finite("the value that it returned", value), checked)

    def _described(self, error: Exception) -> RewardError:
        kind = RewardUnavailableError if is_unavailable(error) else RewardError
        if isinstance(error, RewardError):
            kind = RewardUnavailableError if isinstance(error, RewardUnavailableError) else kind
            return kind(f"the reward {self.name!r}: {error}")
        return kind(f"the reward {self.name!r} raised {type(error).__name__}: {error}{where(error)}")


def weighted(rewards: Sequence[Reward], parts: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Returns an episode's reward, and that of each policy that a reward names.

    The episode's is the weighted sum of the parts that name no policy; a policy's has its own parts, too. If
    every part names a policy, the episode's is the mean of theirs.
    """
    shared = [reward for reward in rewards if reward.policy is None]
    total = sum(reward.weight * parts[reward.name] for reward in shared)
    policies: dict[str, float] = {}
    for reward in rewards:
        if reward.policy is not None:
            before = policies.get(reward.policy, total)
            policies[reward.policy] = before + reward.weight * parts[reward.name]
    return total if shared or not policies else math.fsum(policies.values()) / len(policies), policies


def is_async(fn: Any) -> bool:
    """Returns whether calls must be awaited: `fn` is async, or an object whose `__call__` is."""
    while isinstance(fn, partial | staticmethod):
        fn = fn.func if isinstance(fn, partial) else fn.__func__
    return any(map(inspect.iscoroutinefunction, (fn, getattr(fn, "__call__", None))))  # noqa: B004


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """Returns the parameters to pass: those in ARGUMENTS, and unknown ones without a default."""
    return [
        name
        for name, parameter in inspect.signature(fn).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (name in ARGUMENTS or parameter.default is parameter.empty)
    ]


def final_number(text: str | None) -> Fraction | None:
    """Returns the number after the last `####` (GSM8K's answer format) as an exact fraction, or None.

    It is read whole, in the notations of `numeric`, or not at all: `#### $1,234.50` is 1234.5, `#### 3-5` is
    None. A heading such as `#### Step 2` does not count.
    """
    found = EXTRACTORS["hash"](text or "")
    return found if isinstance(found, Fraction) else None


def exact_answer(output: str | None, answer: Any) -> float:
    """Reward function: 1 if the number after the last `####` of the output equals the answer, else 0.

    Args:
        output: The agent's output.
        answer: A number, a text with `#### number`, or a list of them, of which any counts as right.

    Raises:
        RewardError: An answer is not one number.
    """
    stated = final_number(output)
    golds = [_gold_number(str(gold)) for gold in (answer if isinstance(answer, list | tuple) else [answer])]
    if not golds:
        raise RewardError("the list of right answers is empty; this reward needs one")
    return float(stated is not None and stated in golds)


def _gold_number(answer: str) -> Fraction:
    number = final_number(answer if "####" in answer else f"#### {answer}")
    if number is None:
        raise RewardError(f"the answer {answer[:80]!r} is not one number; write it as digits, such as 1234.5")
    return number
