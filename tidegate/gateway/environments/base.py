"""Interface to the environments of a gateway's tasks. The gateway itself runs no code of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.errors import TidegateError
from tidegate.types import Message, Scored, Task, Trajectory


class EpisodeLostError(TidegateError):
    """An episode's state could not be made or is lost: `infra_error`, which is not charged to the agent."""


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """Description of one environment for a gateway."""

    rewards: Sequence[str]
    """Names of its rewards; empty: the agent's own reward is used."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Its tools in the format of OpenAI's `tools`."""
    stateful: bool = False
    """Whether its episodes have a state, tools or a counterpart."""
    ranked: bool = False
    """Whether a judge compares the episodes of a group before it is ready."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call."""

    content: str
    """The result, or the error's message."""
    error: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """The counterpart's response to an agent's reply."""

    message: Message | None
    """None: there is no further message."""
    done: bool
    """Whether the conversation is over."""


class EnvironmentService(Protocol):
    """Runs the environments' code. An episode is named by its session's id.

    Each method raises EpisodeLostError if the episode's state is lost, or if no service responds in time.
    """

    async def start(self) -> None:
        """Reads which environments there are. Raises StartError."""

    def info(self, env: str) -> EnvironmentInfo | None:
        """Returns what is known of the environment of this name; None: there is none."""

    async def setup(self, episode: str, task: Task, deadline_s: float, create: bool = True) -> None:
        """Makes the state of an episode, which is torn down after `deadline_s` at the latest. Idempotent.

        Without `create` it only checks that the state is there still.
        """

    async def call_tool(
        self, episode: str, name: str, arguments: Mapping[str, Any], key: str | None = None
    ) -> ToolResult:
        """Calls a tool. A call that is repeated with the same key returns the first one's result."""

    async def respond(self, episode: str, reply: Message, key: str | None = None) -> Response:
        """Passes the agent's reply to the counterpart. Calls with a key are repeated as tool calls are."""

    async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
        """Computes the rewards of an episode that ended; its deadline starts when it starts running.

        Raises:
            RewardUnavailableError: A service that a reward calls, as a judge, failed.
            RewardError: A reward raised, took too long or returned no finite number.
        """

    async def rank(self, group: str, task: Task, trajectories: Sequence[Trajectory]) -> list[Scored]:
        """Has a judge compare the episodes of a group; returns what that adds to each one's reward.

        Raises:
            RewardError: The judge gave no valid verdict.
        """

    async def teardown(self, episode: str) -> None:
        """Releases an episode's state. Idempotent; raises nothing."""

    async def close(self) -> None: ...
