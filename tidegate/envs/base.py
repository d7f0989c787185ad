"""Environments: training tasks, held-out tasks, and the rewards of episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tidegate.envs.rewards import Grade, Reward, weighted
from tidegate.envs.tools import Tool, tools_of
from tidegate.errors import ConfigError
from tidegate.loading import check_object, construct, load_object
from tidegate.types import Message, Scored, Task, Trajectory

BUILT_IN = {
    "arithmetic": "tidegate.envs.arithmetic:Arithmetic",
    "dataset": "tidegate.envs.datasets.dataset:Dataset",
    "gsm8k": "tidegate.envs.datasets.gsm8k:GSM8K",
    "harbor": "tidegate.envs.shell.harbor:Harbor",
    "mixture": "tidegate.envs.mixture:Mixture",
    "search_qa": "tidegate.envs.search.search_qa:SearchQA",
}

ADAPTERS = {
    "gymnasium": "tidegate.envs.adapters.gymnasium:Gymnasium",
    "mcp": "tidegate.envs.adapters.mcp:McpTools",
    "openenv": "tidegate.envs.adapters.openenv:OpenEnv",
    "reasoning_gym": "tidegate.envs.adapters.reasoning_gym:ReasoningGym",
    "textarena": "tidegate.envs.adapters.textarena:TextArena",
    "verifiers": "tidegate.envs.adapters.verifiers:Verifiers",
}
"""Prefixes of `env.use` that name an environment of another library: `"textarena:Nim-v0"`."""

RESERVED_NAMES = ("mean", "std", "zero_variance_ratio", "all_solved_ratio", "all_failed_ratio")
"""Names that a reward cannot have, because `reward/<name>` is a metric over all rewards."""


@dataclass(frozen=True, slots=True)
class Done:
    """Return value of `Environment.respond` that ends the conversation."""

    content: str | None = None
    """A last message to the agent, which it does not answer; None: there is none."""


class Environment(ABC):
    """Base class of environments: tasks, rewards, and the state and tools of episodes.

    An environment without rewards uses those that the agent returns (`Result.reward`). One with `setup`,
    tools or `respond` is stateful: each episode has a state of its own, in a process of the environment
    service.
    """

    name: ClassVar[str]
    """Name of the environment, in every one of its tasks."""
    rewards: Sequence[Reward] = ()
    """Reward functions; an episode's reward is their weighted sum."""
    reward_limit_s: float = 0.0
    """Sum of the rewards' own deadlines for one episode, in seconds; 0: they have none. An environment whose
    rewards call a judge sets it; `env.reward_timeout_s` must not be less."""

    @abstractmethod
    def train_task(self, index: int) -> Task:
        """Returns the training task at an index.

        The same index must always give the same task: a run stores only the next index, and continues from
        it when it is resumed.

        Args:
            index: Any integer ≥ 0; the sequence of training tasks has no end.
        """

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        """Returns the held-out sets by name, in the order of reports; the key "" is the main set."""

    async def setup(self, task: Task) -> Any:
        """Returns the state of a new episode; None by default.

        It must depend on the task only, so that all episodes of a group start alike.

        Args:
            task: The task with its answer.

        Raises:
            Exception: Any exception ends the episode as `infra_error`, and it is attempted again.
        """
        return None

    def tools(self) -> Sequence[Tool]:
        """Returns the tools that agents can call: by default the methods marked with `@tool`."""
        return tools_of(self)

    async def respond(self, state: Any, reply: Message) -> Message | str | Done:
        """Returns the response of a game or of a simulated user to the agent's reply.

        Args:
            state: The episode's state.
            reply: The agent's reply as a chat message; its `content` may be None.

        Returns:
            The next message to the agent (a text is a user's message), or `Done` if the conversation is over.
            By default it is over after the first reply.
        """
        return Done()

    async def teardown(self, state: Any) -> None:  # noqa: B027 - optional
        """Releases what `setup` took. Called once when the episode has ended, scored or not."""

    @property
    def stateful(self) -> bool:
        """Whether episodes have a state, tools, or a `respond`."""
        cls = type(self)
        overrides = cls.setup is not Environment.setup or cls.respond is not Environment.respond
        return overrides or bool(self.tools())

    @property
    def names(self) -> Sequence[str]:
        """Names of the rewards; empty if the agent's own reward is used."""
        return [reward.name for reward in self.rewards]

    async def await_rewards(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any = None,
    ) -> dict[str, Grade]:
        """Returns the grades of the async rewards by name. Arguments and exceptions are those of `score`."""
        arguments = self._arguments(task, trajectory, output, messages, state)
        return {r.name: await r.grade_async(arguments) for r in self.rewards if r.is_async}

    def score(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any = None,
        awaited: Mapping[str, Grade] | None = None,
    ) -> Scored:
        """Scores one episode.

        Args:
            task: The task with its answer.
            trajectory: The recorded turns; None if they were not recorded, as with an external endpoint.
            output: The agent's output.
            messages: The whole conversation, including the last reply.
            state: The episode's state; None if the environment has none.
            awaited: Grades of the async rewards by name.

        Returns:
            The weighted sum of the rewards, also by policy, with its parts, metrics and rewards of single
            turns.

        Raises:
            RewardError: A reward function raised or did not return a finite number.
        """
        arguments = self._arguments(task, trajectory, output, messages, state)
        grades = dict(awaited or {})
        grades |= {r.name: r.grade(arguments) for r in self.rewards if r.name not in grades}
        parts = {name: grade.value for name, grade in grades.items()}
        metrics = {key: value for grade in grades.values() for key, value in grade.metrics.items()}
        total, policies = weighted(self.rewards, parts)
        turns = {} if trajectory is None else self.turn_rewards(task, trajectory)
        return Scored(total, parts, metrics, turns, policies)

    def _arguments(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any,
    ) -> dict[str, Any]:
        return {
            "output": output,
            "answer": task.answer,
            "info": task.info,
            "task": task,
            "messages": messages,
            "trajectory": trajectory,
            "state": state,
        }

    def turn_rewards(self, task: Task, trajectory: Trajectory) -> Mapping[int, float]:
        """Returns rewards of single turns by `Turn.index`, in addition to the episode's; none by default.

        A turn is credited with its own reward and those of the turns after it.
        """
        return {}

    def gold_output(self, task: Task) -> str | None:
        """Returns the output of a perfect agent, by default the answer; None if the task has no answer."""
        return None if task.answer is None else str(task.answer)

    def train_size(self) -> int | None:
        """Returns the number n of distinct training tasks (indices 0 to n − 1); None if there is no end."""
        return None

    def rewarders(self) -> Mapping[str, Environment]:
        """Returns the environments that score tasks, by the tasks' `env`; a mixture returns several."""
        return {self.name: self}


def check_reward_timeout(environment: Environment, timeout_s: float) -> None:
    """Raises ConfigError if the rewards' own deadlines add up to more than `timeout_s`."""
    for name, scorer in environment.rewarders().items():
        if scorer.reward_limit_s > timeout_s:
            raise ConfigError(
                f"env.reward_timeout_s = {timeout_s:g} is less than the {scorer.reward_limit_s:g} s that the "
                f"rewards of {name!r} may take by their own deadlines (a judge's: attempts × timeout_s): "
                "raise it, or lower those"
            )


def check_name(use: str) -> None:
    """Raises ConfigError if there is no environment of this name. Reads its file, and imports nothing."""
    check_object(ADAPTERS.get(use.partition(":")[0], use), BUILT_IN, "environment")


def load_environment(use: str, options: Mapping[str, Any]) -> Environment:
    """Loads the environment that the settings name.

    Args:
        use: A built-in name, `file.py:Name`, `module:Name` of a class or an instance, or a key of ADAPTERS
            with a colon and the environment's name in that library.
        options: Arguments of the class's constructor.

    Raises:
        ConfigError: The environment cannot be loaded, does not take an option, or its rewards' names are
            reserved or not distinct.
    """
    library, _, id = use.partition(":")
    if library in ADAPTERS:
        if not id:
            raise ConfigError(f"env.use = {use!r} names no environment: write '{library}:<environment>'")
        if "id" in options:
            raise ConfigError(f"the environment {use!r} has no option 'id': env.use names it")
        options = {"id": id, **options}
    loaded = load_object(ADAPTERS.get(library, use), BUILT_IN, "environment")
    if isinstance(loaded, type) and issubclass(loaded, Environment):
        environment = construct(loaded, options, f"environment {use!r}")
    elif options:
        raise ConfigError(f"{use} is not an environment class, so env.options cannot be passed to it")
    else:
        environment = loaded
    if not isinstance(environment, Environment):
        raise ConfigError(f"{use} is not an Environment, but {type(environment).__name__}")
    names = [reward.name for reward in environment.rewards]
    if reserved := [name for name in names if name in RESERVED_NAMES]:
        raise ConfigError(
            f"{use}: a reward is named {reserved[0]!r}, but reward/{reserved[0]} is another metric "
            "(docs/metrics.md); rename the reward"
        )
    if len(set(names)) != len(names):
        raise ConfigError(f"{use}: two rewards have the same name: {', '.join(names)}")
    return environment
