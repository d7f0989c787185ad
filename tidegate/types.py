"""The vocabulary: one noun, one meaning.

Arrays that cross a process carry their type: token ids are int32, logprobs are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Message = dict[str, Any]
"""One chat message in OpenAI's form: `role`, `content`, and `tool_calls` or `tool_call_id`."""

MODEL_NAME = "policy"
"""Name of the served model: agents are given it, replies and model lists contain it."""

Split = Literal["train", "eval"]


class Outcome(StrEnum):
    """How a session ended. Only `completed` and `truncated` are trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    INFRA_ERROR = "infra_error"
    REWARD_ERROR = "reward_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        return self in (Outcome.COMPLETED, Outcome.TRUNCATED)


@dataclass(frozen=True, slots=True)
class TaskView:
    """What an agent sees of a task."""

    id: str
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `answer` and `info` are for rewards alone."""

    id: str
    env: str
    messages: Sequence[Message]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def view(self) -> TaskView:
        return TaskView(self.id, self.messages)

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "env": self.env,
            "messages": list(self.messages),
            "answer": self.answer,
            "info": dict(self.info),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Task:
        return cls(wire["id"], wire["env"], wire["messages"], wire.get("answer"), wire.get("info") or {})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled. In split `train` the session's own wins over the agent's.

    `max_tokens` bounds one reply; `top_p` 1 and `top_k` −1 mean off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256

    def to_wire(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
        }


CLIENT_CLOSED = "client_closed"
"""The finish reason of a turn whose client closed the stream: it holds what was delivered until then."""


class VersionSpan(NamedTuple):
    """Output tokens `start..end` (end exclusive) were sampled under policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """One sampled reply.

    `delta_ids` is what this turn's prompt adds to its parent's sequence (parent's prompt + parent's
    output); for a root (`parent` None) it is the whole prompt. So a session of n turns takes memory
    in proportion to its distinct tokens, and a follow-up extends the recorded ids by construction.

    `output_mask` marks with 1 the output tokens that may be trained on (0: forced by a grammar);
    None means all of them. `branch` says why a turn does not extend the newest one, else None.
    """

    index: int
    parent: int | None
    delta_ids: Ids
    output_ids: Ids
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    temperature: float
    delivered: bool = True
    kv_version: int | None = None
    cached_tokens: int = 0
    output_mask: npt.NDArray[np.uint8] | None = None
    branch: str | None = None
    started: float = 0.0
    seconds: float = 0.0
    parse: str | None = None
    """How its tool calls were read: `ok`, `malformed` (some of it stayed content), None: there were none."""
    reward: float = 0.0
    """What this turn was given by itself, besides the episode's reward."""
    exempt: str | None = None
    """Why it is not trained on although it was delivered: the request's header or model name exempts it."""
    structured: str | None = None
    """How a reply to a request with a JSON schema was sampled: under the `grammar`, or as free `text`."""

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained on: they reached the agent, and no rule exempts them."""
        return self.delivered and self.exempt is None

    def oldest_version(self) -> int | None:
        """The smallest version among its sampled tokens and their KV; None where any is unknown."""
        if not covers(self.version_spans, len(self.output_ids)):
            return None
        versions = [span.version for span in self.version_spans]
        if self.kv_version is not None:
            versions.append(self.kv_version)
        return min(versions, default=None)

    def token_versions(self) -> npt.NDArray[np.int64]:
        """The version of each output token, −1 where the engine attested none; shape [output]."""
        versions = np.full(len(self.output_ids), -1, dtype=np.int64)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions

    def to_wire(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "parent": self.parent,
            "delta_ids": np.ascontiguousarray(self.delta_ids, dtype="<i4").tobytes(),
            "output_ids": np.ascontiguousarray(self.output_ids, dtype="<i4").tobytes(),
            "logprobs": np.ascontiguousarray(self.logprobs, dtype="<f4").tobytes(),
            "version_spans": [list(span) for span in self.version_spans],
            "finish_reason": self.finish_reason,
            "temperature": self.temperature,
            "delivered": self.delivered,
            "kv_version": self.kv_version,
            "cached_tokens": self.cached_tokens,
            "output_mask": None if self.output_mask is None else self.output_mask.tobytes(),
            "branch": self.branch,
            "started": self.started,
            "seconds": self.seconds,
            "parse": self.parse,
            "reward": self.reward,
            "exempt": self.exempt,
            "structured": self.structured,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Turn:
        mask = wire["output_mask"]
        return cls(
            index=wire["index"],
            parent=wire["parent"],
            delta_ids=np.frombuffer(wire["delta_ids"], dtype="<i4"),
            output_ids=np.frombuffer(wire["output_ids"], dtype="<i4"),
            logprobs=np.frombuffer(wire["logprobs"], dtype="<f4"),
            version_spans=tuple(VersionSpan(*span) for span in wire["version_spans"]),
            finish_reason=wire["finish_reason"],
            temperature=wire["temperature"],
            delivered=wire["delivered"],
            kv_version=wire["kv_version"],
            cached_tokens=wire["cached_tokens"],
            output_mask=None if mask is None else np.frombuffer(mask, dtype=np.uint8),
            branch=wire["branch"],
            started=wire["started"],
            seconds=wire["seconds"],
            parse=wire["parse"],
            reward=wire["reward"],
            exempt=wire["exempt"],
            structured=wire["structured"],
        )


def covers(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans lie end to end over tokens `0..length`, each with an integer version ≥ 0."""
    at = 0
    for version, start, end in spans:
        if type(version) is not int or version < 0 or start != at or end <= start:
            return False
        at = end
    return at == length


def spans_within(spans: Sequence[VersionSpan], first: int, end: int) -> list[VersionSpan]:
    """The spans of the tokens `first..end` alone, counted from `first`."""
    return [
        VersionSpan(version, max(start, first) - first, min(stop, end) - first)
        for version, start, stop in spans
        if start < end and stop > first
    ]


@dataclass(slots=True)
class Trajectory:
    """A finished session: a tree of turns, its reward with the parts it came from, its outcome.

    `reward` is None unless the outcome is trainable. `agent_reward` is what the agent itself claimed;
    it counts only where the environment has no reward function.
    """

    session_id: str
    task_id: str
    env: str
    split: Split
    outcome: Outcome
    turns: list[Turn]
    group_id: str | None = None
    slot: int | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    agent_reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    output: str | None = None
    error: str | None = None
    seconds: float = 0.0
    messages: list[Message] = field(default_factory=list)
    """The newest branch as messages, the last reply included: what rewards and people read."""
    metadata: dict[str, Any] = field(default_factory=dict)
    answer: Any = None
    """The gold answer of its task, for people: the trainer adds it to what it records, the gateway never."""

    def prompt_ids(self, turn: Turn) -> Ids:
        """The whole prompt of a turn, from its root on; shape [prompt]."""
        pieces = [turn.delta_ids]
        while turn.parent is not None:
            turn = self.turns[turn.parent]
            pieces += [turn.output_ids, turn.delta_ids]
        return np.concatenate(pieces[::-1]).astype(np.int32, copy=False)

    def delivered_turns(self) -> Iterator[Turn]:
        return (turn for turn in self.turns if turn.delivered)

    def trainable_turns(self) -> Iterator[Turn]:
        return (turn for turn in self.turns if turn.trainable)

    def oldest_version(self) -> int | None:
        """The oldest version among the trainable tokens; None if unknown anywhere or there are none."""
        versions = [turn.oldest_version() for turn in self.trainable_turns()]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None

    def sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    def to_wire(self) -> dict[str, Any]:
        return {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "env": self.env,
            "split": self.split,
            "outcome": self.outcome.value,
            "turns": [turn.to_wire() for turn in self.turns],
            "group_id": self.group_id,
            "slot": self.slot,
            "reward": self.reward,
            "reward_parts": self.reward_parts,
            "agent_reward": self.agent_reward,
            "metrics": self.metrics,
            "output": self.output,
            "error": self.error,
            "seconds": self.seconds,
            "messages": self.messages,
            "metadata": self.metadata,
            "answer": self.answer,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Trajectory:
        fields = dict(wire)
        fields["outcome"] = Outcome(fields["outcome"])
        fields["turns"] = [Turn.from_wire(turn) for turn in fields["turns"]]
        return cls(**fields)


@dataclass(slots=True)
class Group:
    """The slots of one task that are compared with each other, leased to the trainer."""

    id: str
    task_id: str
    trajectories: list[Trajectory]
    lease_id: str = ""

    def oldest_version(self) -> int | None:
        versions = [trajectory.oldest_version() for trajectory in self.trajectories]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None

    def newest_version(self) -> int | None:
        """The newest version among the trainable tokens; None where there is none."""
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
        """The rewards in slot order; every trajectory of a sealed group has one."""
        return [float(trajectory.reward or 0.0) for trajectory in self.trajectories]

    def to_wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "task_id": self.task_id,
            "lease_id": self.lease_id,
            "trajectories": [trajectory.to_wire() for trajectory in self.trajectories],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Group:
        return cls(
            wire["id"],
            wire["task_id"],
            [Trajectory.from_wire(one) for one in wire["trajectories"]],
            wire["lease_id"],
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """What an environment's rewards made of one episode: the weighted sum and its named parts.

    `metrics` say how it came about (which extractor read the answer); they join the trajectory's own.
    `turn_rewards` are what single turns get besides, by their index.
    """

    reward: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
