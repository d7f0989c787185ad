"""Values that calls of the control plane return."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from tidegate.types import Outcome


@dataclass(frozen=True, slots=True)
class SessionAccess:
    """Address and key with which an agent calls its session.

    Attributes:
        session_id: Id of the session.
        base_url: Base URL of the session's OpenAI-compatible API.
        api_key: Secret key of the session.
    """

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Summary of a finished session.

    Attributes:
        session_id: Id of the session.
        outcome: How the session ended.
        reward: Its reward; None unless the outcome is trainable.
        reward_parts: Parts of the reward, by name.
        agent_reward: Reward returned by the agent itself, if any.
        turns: Number of recorded turns.
        sampled_tokens: Number of sampled tokens.
        oldest_version: Oldest policy version among them; None if unknown for a token, or without turns.
        error: Description of the error, if there was one.
        seconds: Duration of the session in seconds.
        engine_wait_s: Seconds for which its last call had waited for engines that serve, if it ended as
            `timeout` for that reason; else 0.
        policy_rewards: Reward of each policy that has one of its own.
    """

    session_id: str
    outcome: Outcome
    reward: float | None
    reward_parts: dict[str, float]
    agent_reward: float | None
    turns: int
    sampled_tokens: int
    oldest_version: int | None
    _: KW_ONLY
    error: str | None
    seconds: float
    engine_wait_s: float = 0.0
    policy_rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in a listing; `state` is `live`, `ready` or `leased`, `sessions` are ids."""

    id: str
    state: str
    oldest_version: int | None
    sessions: list[str]
    _: KW_ONLY
    unended: int = 0
    """Number of its sessions that have not ended."""
    newest_version: int | None = None
    """Newest policy version of a group that is ready or leased."""
    reward: float | None = None
    """Mean reward of such a group's episodes."""
    client: str | None = None
    """Name of the project key that began a live group; None if none did."""
    outcome: str | None = None
    """How a client's conversation has ended without a reward; None if it has not."""
