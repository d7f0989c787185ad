"""What an environment is: tasks, held-out tasks, and the rewards of an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tidegate.envs.rewards import Reward
from tidegate.errors import ConfigError
from tidegate.loading import construct, load_object
from tidegate.types import Message, Scored, Task, Trajectory

BUILT_IN = {
    "arithmetic": "tidegate.envs.arithmetic:Arithmetic",
    "dataset": "tidegate.envs.datasets.dataset:Dataset",
    "gsm8k": "tidegate.envs.datasets.gsm8k:GSM8K",
    "mixture": "tidegate.envs.mixture:Mixture",
    "search_qa": "tidegate.envs.search.search_qa:SearchQA",
}


TAKEN = ("mean", "std", "zero_variance_ratio", "all_solved_ratio", "all_failed_ratio")
"""What no part of a reward may be called: `reward/<name>` says something of all rewards."""


class Environment(ABC):
    """Tasks to train on, tasks held out, and what an episode is worth.

    An environment without rewards leaves them to the agent (`Result.reward`).
    """

    name: ClassVar[str]
    rewards: Sequence[Reward] = ()
    reward_limit_s: float = 0.0
    """How long the rewards of one episode may take by deadlines of their own; 0: they have none."""

    @abstractmethod
    def train_task(self, index: int) -> Task:
        """The training task at `index` ≥ 0. The split has no end, and an index always gives the same
        task: so one integer is the whole data cursor, and a resumed run goes on exactly."""

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        """The held-out sets in the order they are reported; the key "" is the main one."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the reward's parts; empty where the agent's own reward counts."""
        return [reward.name for reward in self.rewards]

    def score(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
    ) -> Scored:
        """The weighted sum of the rewards, with its parts; `messages` is the whole conversation.

        Raises RewardError where a reward raises or gives no finite number.
        """
        given = {
            "output": output,
            "answer": task.answer,
            "info": task.info,
            "task": task,
            "messages": messages,
            "trajectory": trajectory,
        }
        grades = {reward.name: reward.grade(given) for reward in self.rewards}
        parts = {name: grade.value for name, grade in grades.items()}
        metrics = {key: value for grade in grades.values() for key, value in grade.metrics.items()}
        whole = sum(reward.weight * parts[reward.name] for reward in self.rewards)
        turns = {} if trajectory is None else self.turn_rewards(task, trajectory)
        return Scored(whole, parts, metrics, turns)

    def turn_rewards(self, task: Task, trajectory: Trajectory) -> Mapping[int, float]:
        """What single turns get besides the episode's reward, by their index; nothing by default. A turn
        is credited with its own and with those after it."""
        return {}

    def gold_output(self, task: Task) -> str | None:
        """What a perfect agent would return; None where the task has no answer to say."""
        return None if task.answer is None else str(task.answer)

    def train_size(self) -> int | None:
        """Distinct training tasks: indices 0 to n − 1 give each of them once. None: there is no end."""
        return None

    def rewarders(self) -> Mapping[str, Environment]:
        """Who scores a task, by the task's `env`."""
        return {self.name: self}


def check_reward_timeout(environment: Environment, timeout_s: float) -> None:
    """Raises ConfigError where rewards that keep their own deadlines would be ended by this one."""
    for name, one in environment.rewarders().items():
        if one.reward_limit_s > timeout_s:
            raise ConfigError(
                f"env.reward_timeout_s = {timeout_s:g} is less than the {one.reward_limit_s:g} s that the "
                f"rewards of {name!r} may take by their own deadlines (a judge's: attempts × timeout_s): "
                "raise it, or lower those"
            )


def load_environment(use: str, options: Mapping[str, Any]) -> Environment:
    """The environment that the settings name: a built-in name, `file.py:Name`, or `module:Name`.

    A class is constructed with `options`; an instance is used as it is. Raises ConfigError.
    """
    found = load_object(use, BUILT_IN, "environment")
    if isinstance(found, type) and issubclass(found, Environment):
        environment = construct(found, options, f"environment {use!r}")
    elif options:
        raise ConfigError(f"{use} is no environment class, so env.options cannot be passed to it")
    else:
        environment = found
    if not isinstance(environment, Environment):
        raise ConfigError(f"{use} is no Environment, but {type(environment).__name__}")
    names = [reward.name for reward in environment.rewards]
    if taken := [name for name in names if name in TAKEN]:
        raise ConfigError(
            f"{use}: a reward is called {taken[0]!r}, but reward/{taken[0]} is a metric of its own "
            "(docs/metrics.md): give it another name"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"{use}: two rewards have the same name: {', '.join(names)}")
    return environment
