"""Scores a client's conversation when it ends, by the functions of `gateway.conversation_rewards`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError, RewardError
from tidegate.gateway.groups.rewards import UnrewardedError, number
from tidegate.loading import load_object
from tidegate.types import Message, Scored, Task, Trajectory

ENVIRONMENT = "conversation"
"""Name under which a gateway's rewarders have those of conversations."""
ConversationReward = Callable[[Trajectory], float | None]
"""Scores a conversation; None: no opinion. It is called in a thread."""


@dataclass(frozen=True, slots=True)
class ConversationScorer:
    """Adds the functions' values to the conversation's feedback.

    Args:
        functions: The functions by name.
        limits: Range of the sum of a conversation's rewards; None: any.
    """

    functions: dict[str, ConversationReward]
    limits: tuple[float, float] | None = None

    @property
    def names(self) -> Sequence[str]:
        return list(self.functions)

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored:
        """Score a conversation whose `reward_parts` are its feedback.

        Raises:
            UnrewardedError: There is no feedback and no function has an opinion.
            RewardError: A value is not a finite number, or the sum is outside the range.
        """
        values = {name: function(trajectory) for name, function in self.functions.items()}
        parts = {name: number(name, value) for name, value in values.items() if value is not None}
        turns = sum(turn.reward for turn in trajectory.turns)
        if not (parts or trajectory.reward_parts or turns):
            raise UnrewardedError("there is no feedback, and no reward function has an opinion")
        reward = sum(parts.values()) + sum(trajectory.reward_parts.values())
        if self.limits is not None and not self.limits[0] <= reward + turns <= self.limits[1]:
            raise RewardError(
                f"the conversation's rewards add up to {reward + turns:g}, which is outside "
                f"gateway.reward_range = [{self.limits[0]:g}, {self.limits[1]:g}]"
            )
        return Scored(reward, parts)


def scorer_of(uses: Sequence[str], limits: tuple[float, float] | None) -> ConversationScorer:
    """Load the functions that `gateway.conversation_rewards` names.

    Raises:
        ConfigError: There is no such function, or two have the same name.
    """
    functions: dict[str, ConversationReward] = {}
    for use in uses:
        function, name = load_object(use, {}, "reward function"), use.rpartition(":")[2]
        if not callable(function):
            raise ConfigError(f"gateway.conversation_rewards: {use!r} is no function")
        if name in functions:
            raise ConfigError(f"gateway.conversation_rewards has two functions named {name!r}; rename one")
        functions[name] = function
    return ConversationScorer(functions, limits)
