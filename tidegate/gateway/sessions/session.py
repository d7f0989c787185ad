"""Sessions: who may call, under which sampling, until when, and what was recorded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.engines.engine import Affinity
from tidegate.gateway.errors import ApiError, session_closed
from tidegate.gateway.sessions.calls import PendingTurns
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sessions.tree import TurnNode, TurnTree
from tidegate.types import Outcome, Sampling, Split, Task, Trajectory


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How a session ended, decided once, before its reward is known."""

    outcome: Outcome
    error: str | None
    at: float
    """In the event loop's time."""
    output: str | None = None
    claimed: Any = None
    """The reward that the agent returned."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What whoever finishes a session says of it."""

    outcome: Outcome | None = None
    error: str | None = None
    output: str | None = None
    reward: Any = None
    """The one that the agent returned."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class GatewaySession:
    """One run of one agent on one task. Times are the event loop's."""

    id: str
    key_hash: bytes
    task: Task | None
    env: str
    split: Split
    sampling: Sampling
    opened: float
    deadline: float
    group_id: str | None = None
    slot: int | None = None
    seed: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    limits: SessionLimits = field(default_factory=SessionLimits)
    untrained_models: tuple[str, ...] = ()
    """Model names that the agent gives for auxiliary calls, which are recorded and not trained on."""
    number: int = 0
    """By which the journal knows it."""
    epoch: int | None = None
    """Of the trainer that opened it; it ends with that trainer. None: it ends with nobody."""
    tree: TurnTree = field(default_factory=TurnTree)
    calls: PendingTurns = field(default_factory=PendingTurns)
    seat: Affinity = field(init=False)
    rewards: dict[str, float] = field(default_factory=dict)
    """Posted while it ran, by name."""
    turn_rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    """The same for single turns, by index and name."""
    gave_up: str | None = None
    """Why the gateway gave up on the engines in its last call, if it did."""
    spent: str | None = None
    """Which budget is used up, once a call was refused for it."""
    overflowed: str | None = None
    """That its history had outgrown the model's context when it last asked; the next reply takes it back."""
    interrupted: str | None = None
    """That the gateway was restarted since its last reply, which an agent may take for an error."""
    refused: int = 0
    """Calls that were answered with an error."""
    last_refusal: str = ""
    closed: str | None = None
    """Why it takes no more calls."""
    unwritten: dict[int, TurnNode] = field(default_factory=dict)
    """Turns that the journal could not take, by index; the next write takes them along."""
    writing: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Turns on their way into the journal."""
    preparing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    """Held while a large request of it is prepared, in a thread: others of it wait."""
    ending: SessionResult | None = None
    finishing: asyncio.Task[Trajectory] | None = None
    trajectory: Trajectory | None = None
    forget_at: float | None = None

    def __post_init__(self) -> None:
        self.seat = Affinity(self.id, self.group_id or self.id)

    @property
    def state(self) -> str:
        if self.trajectory is not None:
            return "finished"
        return "open" if self.closed is None else "closing"

    @property
    def disturbed(self) -> str | None:
        """That engines were missing when it called them, which costs time; None: they never were."""
        number = self.seat.disturbances
        return f"its calls found no engine, or lost it, {number} times" if number else None

    def note_refusal(self, refusal: ApiError) -> None:
        """An error goes out instead of a reply."""
        self.refused += 1
        self.last_refusal = str(refusal)

    def check_open(self, now: float) -> None:
        """Raises Refusal where it is over."""
        if self.closed is not None:
            raise session_closed(self.closed)
        if now >= self.deadline:
            raise session_closed("its deadline passed")

    def close(self, why: str) -> None:
        """Take no more calls, and end those under way."""
        if self.closed is None:
            self.closed = why
        self.calls.cancel(session_closed(self.closed))
        self.seat.leave()

    def stop(self, why: str) -> None:
        """Take no more calls, and end its reward too: it is about to be forgotten."""
        self.close(why)
        if self.finishing is not None:
            self.finishing.cancel()

    def oldest_version(self) -> int | None:
        """The oldest version attested so far among its delivered turns; None while there is none."""
        if self.trajectory is not None:
            return self.trajectory.oldest_version()
        known = [node.turn.oldest_version() for node in self.tree.nodes if node.turn.trainable]
        return min((one for one in known if one is not None), default=None)


def decide(session: GatewaySession, told: FinishReport, now: float) -> SessionResult:
    """How a session ends, before its reward is known."""
    outcome, why = _outcome(session, told.outcome, now)
    return SessionResult(outcome, told.error or why, now, told.output, told.reward, told.metrics)


def _outcome(session: GatewaySession, told: Outcome | None, now: float) -> tuple[Outcome, str | None]:
    """The outcome, and why if it went wrong."""
    spent = session.spent or session.overflowed
    if told is not None and told not in (Outcome.COMPLETED, Outcome.TRUNCATED):
        lost = session.disturbed if told is Outcome.TIMEOUT else session.gave_up
        infra = lost or session.interrupted
        if told in (Outcome.AGENT_ERROR, Outcome.TIMEOUT) and infra is not None:
            return Outcome.INFRA_ERROR, infra
        if told is Outcome.AGENT_ERROR and spent is not None:
            return Outcome.TRUNCATED, spent
        return told, None
    if now >= session.deadline:
        if session.disturbed is not None:
            return Outcome.INFRA_ERROR, session.disturbed
        return Outcome.TIMEOUT, "the session's deadline passed before it was finished"
    if session.gave_up is not None:
        return Outcome.INFRA_ERROR, session.gave_up
    if spent is not None:
        return Outcome.TRUNCATED, spent
    newest = session.tree.newest()
    if newest is None:
        if session.refused:
            calls = "only call was" if session.refused == 1 else f"{session.refused} calls were"
            return Outcome.AGENT_ERROR, (
                f"no call of the agent was answered: its {calls} refused, the last one with: "
                f"{session.last_refusal}"
            )
        return Outcome.AGENT_ERROR, (
            "the agent never called the gateway (or never took a reply): "
            "it must use the session's base_url and api_key"
        )
    if newest.turn.exempt is not None:
        return Outcome.AGENT_ERROR, (
            f"every call of the agent is exempt from training, the last one by its {newest.turn.exempt}"
        )
    return (Outcome.TRUNCATED if newest.turn.finish_reason == "length" else Outcome.COMPLETED), None


def trajectory_of(session: GatewaySession, ending: SessionResult) -> Trajectory:
    """A session that ended, before its reward."""
    newest = session.tree.newest()
    turns = session.tree.turns()
    for index, parts in session.turn_rewards.items():
        turns[index].reward = sum(parts.values())
    return Trajectory(
        session_id=session.id,
        task_id=session.task.id if session.task is not None else "",
        env=session.env,
        split=session.split,
        outcome=ending.outcome,
        turns=turns,
        group_id=session.group_id,
        slot=session.slot,
        metrics=dict(ending.metrics),
        output=ending.output,
        error=ending.error,
        seconds=ending.at - session.opened,
        messages=session.tree.history(newest.turn.index) if newest is not None else [],
        metadata=session.metadata,
    )


def check_limits(session: GatewaySession, now: float) -> int | None:
    """How many tokens the next call may sample, None for any number; raises Refusal where it may not be.

    `now` is in the event loop's time.
    """
    limits = session.limits
    live = len(session.calls.live)
    if limits.turns is not None and (turns := session.tree.replies() + live) >= limits.turns:
        raise _spent(session, f"turns: {turns} of {limits.turns}")
    if limits.seconds is not None and (seconds := now - session.opened) >= limits.seconds:
        raise _spent(session, f"seconds: {seconds:.0f} of {limits.seconds:g}")
    left = None
    if limits.tokens is not None:
        tokens = session.tree.sampled_tokens
        left = limits.tokens - tokens
        if left <= 0:
            raise _spent(session, f"tokens: {tokens} of {limits.tokens}")
    if limits.calls is not None and live >= limits.calls:
        raise ApiError(
            f"this session has {live} calls under way, and may have {limits.calls} at once",
            status=429,
            type="too_many_calls",
            code="too_many_calls",
            retryable=True,
        )
    return left


def _spent(session: GatewaySession, what: str) -> ApiError:
    session.spent = f"the session's budget is used up ({what})"
    return ApiError(
        f"{session.spent}; no more is sampled for it", status=403, type="budget", code="budget_exceeded"
    )
