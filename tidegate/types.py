"""Data types shared by all packages: tasks, trajectories, groups. docs/glossary.md defines the terms."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tidegate.errors import RewardError
from tidegate.service import exact
from tidegate.turn import Ids, Turn

T = TypeVar("T")
LISTED = np.dtype([("logprob", "<f4"), ("id", "<i4")])
"""One of an engine's likeliest ids."""
PACKED_LISTS = "x-tidegate-packed-lists"
"""Header with which a request accepts likeliest ids as `LISTED` in base64, where SGLang's form has a list of
lists. Servers that do not know it ignore it."""
Message = dict[str, Any]
"""One chat message in OpenAI's format: `role`, `content`, and `tool_calls` or `tool_call_id`."""

MODEL_NAME = "policy"
"""Name of the served model in sessions, replies and model lists."""

MAX_OUTPUT = 1_000_000
"""Limit of an episode's output, in characters."""
MAX_METRICS = 100
"""Limit of the number of an episode's metrics, and of the characters in a name."""
MAX_ERROR = 2_000
"""Characters of an error that are recorded with the episode; the log has the full text."""

CONVERSATION = "conversation"
"""Task id and environment of clients' conversations."""

Split = Literal["train", "eval"]


class Outcome(StrEnum):
    """How an episode ended. Only `completed` and `truncated` episodes have a reward and are trained on."""

    COMPLETED = "completed"
    """The agent returned."""
    TRUNCATED = "truncated"
    """The last reply reached its token limit, or the session its context or another limit."""
    AGENT_ERROR = "agent_error"
    """The agent failed: it raised, its program ended with an error, or it has no turn to train on."""
    INFRA_ERROR = "infra_error"
    """An engine, the worker, the environment's state, or a service that the agent uses (it raised
    `InfrastructureError`) failed."""
    REWARD_ERROR = "reward_error"
    """A reward function raised, exceeded its timeout, or did not return a finite number, or the reply of
    a judge was invalid."""
    TIMEOUT = "timeout"
    """The agent did not return before its deadline."""
    CANCELLED = "cancelled"
    """The trainer no longer needs the episode, or the process that ran its agent exited."""
    UNREWARDED = "unrewarded"
    """A client's conversation for which no feedback came in time."""

    @property
    def trainable(self) -> bool:
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether neither the policy nor the task caused it; it is never charged to a task."""
        return self in (Outcome.INFRA_ERROR, Outcome.CANCELLED)


@dataclass(frozen=True, slots=True)
class TaskView:
    """The part of a task that agents receive."""

    id: str
    """Id of the task."""
    messages: Sequence[Message]
    """The prompt."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of an environment."""

    id: str
    """Unique in its environment; the same problem always has the same id."""
    env: str
    """Name of the environment that scores it."""
    messages: Sequence[Message]
    """The prompt."""
    answer: Any = None
    """The right answer, or a list of them. Passed to rewards only."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further values for rewards, serialisable as JSON. Agents do not see them."""

    @property
    def kind(self) -> str:
        """Its environment, and `info["kind"]` or `info["template"]` if that is a text: a part of the
        environment's tasks that are about equally hard."""
        named = [self.info.get(key) for key in ("kind", "template")]
        return "/".join([self.env, *(name for name in named if isinstance(name, str))][:2])

    def view(self) -> TaskView:
        """Returns the task without `answer` and `info`."""
        return TaskView(self.id, self.messages)

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "env": self.env,
            "messages": list(self.messages),
            "answer": self.answer,
            "info": dict(self.info),
        }


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a session. In split `train` they override those of the agent's requests."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 switches it off."""
    top_k: int = -1
    """−1 switches it off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0 switches it off."""
    narrowed_by_agents: bool = False
    """Whether the agent's own top-p, top-k and min-p apply in split `train`, too."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Limit of one reply."""
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    """Number of the engine's likeliest ids that are recorded in place of each sampled one."""
    routed_experts: bool = False
    """Whether the experts of every token are recorded."""

    @property
    def narrows(self) -> bool:
        """Whether top-p, top-k or min-p may exclude ids."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


ENGINE_WAIT_S = "engine_wait_s"
"""Metric of an episode that ended as `timeout` while a call waited for engines that serve: the seconds for
which it had waited. Such an episode is not charged to its task."""


@dataclass(slots=True)
class ToolCall:
    """One call of a tool of the task's environment, as the gateway recorded it."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Arguments as the agent sent them."""
    result: str
    """What the agent received: the result, or the error's message."""
    error: bool
    """Whether the tool refused or failed."""
    turn: int | None = None
    """Index of the newest turn recorded before the call; None if there was none."""
    started: float = 0.0
    """Unix time of the call."""
    seconds: float = 0.0
    """Duration of the call."""
    known: bool = True
    """Whether the environment has a tool of this name."""


@dataclass(slots=True)
class Trajectory:
    """A session that has ended: its tree of turns, outcome and reward."""

    session_id: str
    """Id of the session at the gateway."""
    task_id: str
    """Id of the task."""
    env: str
    """Name of the environment that scored it."""
    split: Split
    """`train` or `eval`."""
    outcome: Outcome
    """How the episode ended (docs/glossary.md)."""
    turns: list[Turn]
    """In the order in which they ended; each refers to its parent by index."""
    _: KW_ONLY
    group_id: str | None = None
    """None for episodes outside a group, such as those of evaluations."""
    slot: int | None = None
    """Its place in the group, from 0."""
    reward: float | None = None
    """None unless the outcome is trainable."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward, by name, and parts that the agent posted."""
    agent_reward: float | None = None
    """Reward reported by the agent; used only if the environment has no reward functions."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics reported by the agent and the rewards."""
    output: str | None = None
    """Output returned by the agent."""
    error: str | None = None
    """Cause of a failed episode."""
    seconds: float = 0.0
    """Duration from opening to finishing the session."""
    messages: list[Message] = field(default_factory=list)
    """The newest branch as messages, including the last reply, for rewards and readers."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Values that the opener of the session attached to it."""
    answer: Any = None
    """The task's answer, for readers of records: added by the trainer, never by the gateway."""
    client: str | None = None
    """Name of the project key whose client ran the episode; None if the trainer issued it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls of the environment's tools, in the order in which they ended."""
    reward_started: float = 0.0
    """Unix time at which the environment service was called for the rewards; 0 if it was not."""
    reward_seconds: float = 0.0
    """Duration of that call, with its time in the service's queue."""
    policy_rewards: dict[str, float] = field(default_factory=dict)
    """Reward of each policy that has one of its own; the others have the episode's `reward`."""

    def reward_of(self, policy: str) -> float | None:
        """Returns the reward of a policy's turns: its own, or the episode's."""
        return None if self.reward is None else self.policy_rewards.get(policy, self.reward)

    def prompt_ids(self, turn: Turn) -> Ids:
        """Returns the whole prompt of a turn, from its root; shape [prompt]."""
        pieces = [turn.delta_ids]
        while turn.parent is not None:
            turn = self.turns[turn.parent]
            pieces += [turn.output_ids, turn.delta_ids]
        return np.concatenate(pieces[::-1]).astype(np.int32, copy=False)

    def delivered_turns(self) -> Iterator[Turn]:
        """Yields the turns whose reply reached the agent."""
        return (turn for turn in self.turns if turn.delivered)

    def cut(self) -> bool:
        """Whether the last delivered reply ended at its token limit or at the context."""
        last = [*self.delivered_turns()][-1:]
        return bool(last) and last[0].finish_reason == "length"

    def trainable_turns(self) -> Iterator[Turn]:
        """Yields the turns that may be trained on."""
        return (turn for turn in self.turns if turn.trainable)

    def oldest_version(self) -> int | None:
        """Returns the oldest version of the trainable tokens, None if any is unknown or there are none."""
        return _oldest(turn.oldest_version() for turn in self.trainable_turns())

    def sampled_tokens(self) -> int:
        """Returns the number of output tokens of all turns."""
        return sum(len(turn.output_ids) for turn in self.turns)


@dataclass(slots=True)
class Group:
    """The trajectories of one task whose rewards are compared with each other, leased to the trainer."""

    id: str
    task_id: str
    trajectories: list[Trajectory]
    """In the order of their slots."""
    lease_id: str = ""

    @property
    def client(self) -> str | None:
        """Name of the project key whose client formed the group; None if the trainer issued it."""
        return self.trajectories[0].client if self.trajectories else None

    def oldest_version(self) -> int | None:
        """Returns the oldest version of the trainable tokens, None if any is unknown or there are none.

        A trajectory whose first prompt exceeded the context, for example, has no turn and does not count.
        """
        turns = (turn for trajectory in self.trajectories for turn in trajectory.trainable_turns())
        return _oldest(turn.oldest_version() for turn in turns)

    def newest_version(self) -> int | None:
        """Returns the newest version of the trainable tokens, None if there are none."""
        return max(
            (
                span.version
                for trajectory in self.trajectories
                for turn in trajectory.trainable_turns()
                for span in turn.version_spans
            ),
            default=None,
        )

    def rewards(self) -> list[float]:
        """Returns the rewards in slot order. Every trajectory of a sealed group has one; in other groups, of
        which none is trained on, a missing reward is given as 0."""
        return [float(trajectory.reward or 0.0) for trajectory in self.trajectories]

    def solved(self) -> int:
        """Returns the number of trajectories that solved the task.

        Their rewards are above the middle between the group's lowest and highest one; if all rewards are
        equal up to rounding, above 0.
        """
        rewards = self.rewards()
        low, high = min(rewards), max(rewards)
        alike = high - low <= 1e-9 * max(1.0, abs(low), abs(high))
        middle = 0.0 if alike else (low + high) / 2
        return sum(reward > middle for reward in rewards)


def _oldest(versions: Iterable[int | None]) -> int | None:
    """Returns the smallest version, None if one is None or there are none."""
    values = list(versions)
    return None if None in values else min((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of one episode."""

    reward: float
    """Weighted sum of the parts."""
    parts: Mapping[str, float]
    """Unweighted value of each reward, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """How the rewards were computed (such as which extractor read the answer); added to the trajectory's."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single turns in addition to `reward`, by index."""
    policy_rewards: Mapping[str, float] = field(default_factory=dict)
    """In place of `reward`, for the policies that a reward names."""


def finite(name: str, value: object) -> float:
    """Returns a number, a bool, or a scalar of numpy's or torch's types as a float, which is the nearest one
    to an integer beyond 2^53.

    Raises:
        RewardError: It is not a finite number.
    """
    scalar: Any = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        scalar = scalar.item()
    try:
        if isinstance(scalar, Real | Decimal) and math.isfinite(scalar):
            return float(scalar)
    except (OverflowError, ValueError):  # an integer that no float can hold; a signalling NaN
        pass
    raise RewardError(f"{name} is {value!r:.200}, not a finite number")


def finite_by_name(what: str, values: Mapping[Any, object]) -> dict[str, float]:
    """Returns numbers by name as floats; `what` comes before a name in errors.

    Raises:
        RewardError: A name is not a text, or a number is not finite.
    """
    for name in values:
        if not isinstance(name, str):
            raise RewardError(f"{what}{name!r} has a name that is not a text; write {str(name)!r}")
    return {str(name): finite(f"{what}{name!r}", value) for name, value in values.items()}


def finite_reward(value: object) -> float | dict[str, float]:
    """Returns an agent's reward as a float, or if it names policies, as a float for each.

    Raises:
        RewardError: It is not a finite number, or names no policy.
    """
    if not isinstance(value, Mapping):
        return finite("the agent's reward", value)
    if not value:
        raise RewardError("the agent's reward is {}, which names no policy; return None, or a number")
    return finite_by_name("the agent's reward of policy ", value)


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance by name, unconverted."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def to_wire(value: Any) -> bytes:
    """Returns turns, trajectories and groups as MessagePack, their arrays as little-endian bytes."""
    return exact.pack(value, array_bytes)


def from_wire(data: bytes, kind: type[T]) -> T:
    """Restores what `to_wire` wrote. Raises msgspec.ValidationError if it is of another kind."""
    restored: T = exact.unpack(data, kind, _array)
    return restored


def array_bytes(array: npt.NDArray[Any]) -> bytes:
    """Returns an array's little-endian bytes."""
    kind = _SHORT_TYPES.get(array.dtype.name) or _WIRE_TYPES[array.dtype.kind]
    return array.astype(kind, copy=False).tobytes()


_SHORT_TYPES = {"float16": "<f2", "uint16": "<u2"}
_WIRE_TYPES = {"i": "<i4", "f": "<f4", "u": "u1"}


@functools.cache
def element_type(kind: Any) -> np.dtype[Any]:
    """Returns the type of the elements of an array type such as `Ids`."""
    [element] = get_args(get_args(kind)[1])
    dtype: np.dtype[Any] = np.dtype(element)
    return dtype


def _array(kind: Any, data: bytes) -> npt.NDArray[Any]:
    """Returns an array of a type such as `Ids`, which shares `data`."""
    return np.frombuffer(data, dtype=element_type(kind))
