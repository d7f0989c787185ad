"""Scores clients' conversations when they end, by the functions of `gateway.conversation_rewards`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Grade, is_async
from tidegate.errors import ConfigError, RewardError, UnrewardedError
from tidegate.loading import load_object
from tidegate.types import CONVERSATION, Message, Scored, Task, Trajectory, finite

ConversationReward = Callable[[Trajectory], float | Awaitable[float | None] | None]
"""Scores a conversation; None: adds nothing. It may be async; if it is not, it is called in a thread."""


class ConversationRewards(Environment):
    """Adds the functions' values to a conversation's feedback. It has no tasks.

    Args:
        functions: The functions by name.
        limits: Range of the sum of a conversation's rewards; None: any.
    """

    name: ClassVar[str] = CONVERSATION

    def __init__(
        self, functions: Mapping[str, ConversationReward], limits: tuple[float, float] | None = None
    ) -> None:
        self.functions = functions
        self.limits = limits

    @property
    def names(self) -> Sequence[str]:
        return list(self.functions)

    def train_task(self, index: int) -> Task:
        raise NotImplementedError("clients begin conversations")

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {}

    async def await_rewards(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any = None,
    ) -> dict[str, Grade]:
        """Returns the values of the async functions that have an opinion. Exceptions are those of `score`."""
        functions: dict[str, Any] = {name: fn for name, fn in self.functions.items() if is_async(fn)}
        values = {name: await function(trajectory) for name, function in functions.items()}
        return {name: Grade(finite(name, value)) for name, value in values.items() if value is not None}

    def score(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any = None,
        awaited: Mapping[str, Grade] | None = None,
    ) -> Scored:
        """Scores a conversation whose `reward_parts` are its feedback.

        Raises:
            UnrewardedError: There is no feedback, and every function returned None.
            RewardError: A value is not a finite number, or the sum is outside the range.
        """
        assert trajectory is not None, "a gateway recorded it"
        functions: dict[str, Any] = {name: fn for name, fn in self.functions.items() if not is_async(fn)}
        values = {name: function(trajectory) for name, function in functions.items()}
        parts = {name: finite(name, value) for name, value in values.items() if value is not None}
        parts |= {name: grade.value for name, grade in (awaited or {}).items()}
        turns = sum(turn.reward for turn in trajectory.turns)
        if not (parts or trajectory.reward_parts or turns):
            raise UnrewardedError("there is no feedback, and every reward function returned None")
        reward = sum(parts.values()) + sum(trajectory.reward_parts.values())
        finite("the sum of the conversation's rewards", reward + turns)
        if self.limits is not None and not self.limits[0] <= reward + turns <= self.limits[1]:
            raise RewardError(
                f"the conversation's rewards add up to {reward + turns:g}, which is outside "
                f"gateway.reward_range = [{self.limits[0]:g}, {self.limits[1]:g}]"
            )
        return Scored(reward, parts)


def conversation_environment(uses: Sequence[str], limits: tuple[float, float] | None) -> ConversationRewards:
    """Loads the functions that `gateway.conversation_rewards` names.

    Raises:
        ConfigError: There is no such function, or two have the same name.
    """
    functions: dict[str, ConversationReward] = {}
    for use in uses:
        function, name = load_object(use, {}, "reward function"), use.rpartition(":")[2]
        if not callable(function):
            raise ConfigError(f"gateway.conversation_rewards: {use!r} is not a function")
        if name in functions:
            raise ConfigError(f"gateway.conversation_rewards has two functions named {name!r}; rename one")
        functions[name] = function
    return ConversationRewards(functions, limits)
