"""Defines a session: access, sampling, limits, recorded turns and outcome."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field

from tidegate.gateway.engines.engine import Affinity
from tidegate.gateway.errors import ApiError, session_closed
from tidegate.gateway.sessions.body_prefixes import BodyPrefixes
from tidegate.gateway.sessions.limits import Seconds, SessionLimits
from tidegate.gateway.sessions.model_calls import SessionModelCalls
from tidegate.gateway.sessions.tool_calls import MAX_RECORDED, SessionToolCalls
from tidegate.gateway.sessions.tree import TurnNode, TurnTree
from tidegate.types import ENGINE_WAIT_S, Outcome, Sampling, Split, Task, Trajectory

_TIMED_OUT = re.compile("time.?out|timed out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SessionResult:
    """Result of a session, decided once, before its reward is computed."""

    outcome: Outcome
    error: str | None
    at: float
    """Time on the event loop's clock."""
    output: str | None = None
    agent_reward: Any = None
    """Reward returned by the agent."""
    metrics: dict[str, float] = field(default_factory=dict)
    imposed: bool = False
    """Decided by the gateway: a later finish by the worker is refused."""
    reported: Outcome | None = None
    """Outcome that the caller reported; None if the gateway was left to decide."""


class SlowWait(NamedTuple):
    """A wait for a reply that ended without one while engines served."""

    text: str
    seconds: float
    given_up: bool
    """The client ended it."""


@dataclass(frozen=True, slots=True)
class FinishReport:
    """Arguments of the call that finishes a session."""

    outcome: Outcome | None = None
    error: str | None = None
    output: str | None = None
    reward: Any = None
    """Reward returned by the agent."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, slots=True, kw_only=True)
class SessionRequest:
    """Arguments of the call that opens a session; the body of `POST /sessions`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    task: Task | None = None
    env: Annotated[str, BeforeValidator(lambda env: env or "")] = ""
    """Name of the environment; empty: the task's."""
    split: Split = "train"
    sampling: Sampling = field(default_factory=Sampling)
    deadline_s: Seconds | None = None
    """None: the gateway's default."""
    group_id: str | None = None
    slot: int | None = None
    seed: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    limits: SessionLimits = field(default_factory=SessionLimits)
    untrained_models: tuple[str, ...] = ()
    """Model names that mark auxiliary calls, which are recorded and not trained on."""
    trainer_epoch: Annotated[int, Field(ge=0)] | None = None
    """Epoch of the trainer that opens it; the session ends when a newer trainer takes over."""
    offer_heartbeat_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Offers the session to workers, which send heartbeats at this interval; 0: to the trainer's own agents,
    which send none. Its deadline then starts, with a new key, when a worker takes it."""
    candidate: bool = False
    """Samples from the candidate version while there is one."""
    key: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{32,64}$")] | None = None
    """Secret part of the session's API key. A repeated request with the same key opens no other session."""


@dataclass(eq=False, slots=True)
class GatewaySession(SessionRequest):
    """One run of one agent on one task. Times are on the event loop's clock."""

    id: str
    key_hash: bytes
    opened: float
    deadline: float
    _: KW_ONLY
    number: int = 0
    """Number of the session in the journal."""
    worker: str | None = None
    """Name of the worker that took it; None if none did."""
    client: str | None = None
    """Name of the project key that opened it; None if none did."""
    conversation: str | None = None
    """Name of the conversation, empty without one; None if its calls are made with its own key."""
    worker_seen: float = 0.0
    """Time of the worker's last heartbeat."""
    on_stop: Callable[[GatewaySession], None] | None = None
    """Called when the session ends for another reason than its worker's finish."""
    former_keys: list[bytes] = field(default_factory=list)
    """Hashes of earlier keys, which are void, but recognise a repeated request to open it."""
    tree: TurnTree = field(default_factory=TurnTree)
    calls: SessionModelCalls = field(default_factory=SessionModelCalls)
    tool_calls: SessionToolCalls = field(default_factory=SessionToolCalls)
    set_up: bool = False
    """Whether its environment has made its state."""
    state_lost: str | None = None
    """Why its environment's state is lost, if it is: the session ends as `infra_error`."""
    affinity: Affinity = field(init=False)
    """That of the only policy."""
    affinities: dict[str, Affinity] = field(init=False, default_factory=dict)
    """Those of named policies."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards posted during the run, by name."""
    turn_rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    """Rewards posted for single turns, by index and name."""
    engine_error: str | None = None
    """Engine failure of the last call, if it failed."""
    slow: SlowWait | None = None
    """The last call's wait for engines that serve, if the deadline or the client ended it."""
    exhausted_budget: str | None = None
    """The exhausted budget, once a call was refused because of it."""
    context_overflow: str | None = None
    """Set when the last request exceeded the model's context; cleared by the next reply."""
    restart_reason: str | None = None
    """Set when the gateway was restarted since the last reply; the agent may report that as an error."""
    refused_calls: int = 0
    """Number of calls answered with an error."""
    last_refusal: str = ""
    closed: str | None = None
    """Reason that it accepts no more calls; None while it is open."""
    unpersisted: dict[int, TurnNode] = field(default_factory=dict)
    """Turns that the next write to the journal includes, by index: new or changed, or of a failed write."""
    pending_writes: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Journal writes in progress, by turn index."""
    body_prefixes: BodyPrefixes = field(init=False, default_factory=BodyPrefixes)
    """The beginnings of its newest request bodies."""
    prepare_lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    """Held while a thread prepares a large request of this session; its other requests wait."""
    opening: asyncio.Future[None] | None = None
    """Write of the session to the journal; None if it was restored from there."""
    ending: SessionResult | None = None
    """How it ended; None while no end is decided."""
    finishing: asyncio.Task[Trajectory] | None = None
    """Computes its reward and stores its trajectory."""
    trajectory: Trajectory | None = None
    forget_at: float | None = None
    """Time after which it may be deleted, once its trajectory is stored."""
    read_back: Callable[[], None] | None = None
    """Sets `tree` and `trajectory` of a session that was finished before a restart, at their first use."""
    ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set when its trajectory is stored or it is deleted."""

    def __post_init__(self) -> None:
        flow = self.id if self.client is None else f"key {self.client}"
        self.affinity = Affinity(flow, self.group_id or self.id, self.candidate)

    def affinity_of(self, policy: str, engines: str) -> Affinity:
        """Returns the affinity of the session's calls to a policy, which `engines` serve."""
        if not policy:
            return self.affinity
        # One for each policy: its engine's cache has the prefixes of its own turns only.
        if (found := self.affinities.get(policy)) is None:
            own = self.affinity
            found = self.affinities[policy] = Affinity(own.flow, own.key, own.candidate, policy=engines)
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # for attributes that are not set
            if name in ("tree", "trajectory"):
                if (read_back := self.read_back) is not None:  # else a thread has just set them
                    read_back()
                return object.__getattribute__(self, name)
            raise AttributeError(name)

    @property
    def finished(self) -> bool:
        """Whether its trajectory is stored."""
        return self.forget_at is not None

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        return "open" if self.closed is None else "closing"

    @property
    def engine_outage(self) -> str | None:
        """Describes how often its calls had no engine, which costs time; None if never."""
        number = sum(one.disruptions for one in (self.affinity, *self.affinities.values()))
        return f"no engine was available, or it was lost, {number} times during its calls" if number else None

    def note_slow(self, load: str, since: float, *, given_up: bool = False) -> None:
        """Record that a call ended without a reply while engines served."""
        waited_s = asyncio.get_running_loop().time() - since
        self.slow = SlowWait(f"a call had waited {waited_s:.3g} s for its reply: {load}", waited_s, given_up)

    def waits(self, now: float) -> SlowWait | None:
        """Returns the wait of the running call that began first, if engines serve; else that of the last one
        which ended without a reply, or of all replies if they took half of the time until the deadline."""
        for call in sorted(self.calls.running, key=lambda call: call.ordinal):
            if (load := call.engine_request.load()) is not None:
                self.note_slow(load, now - call.seconds)
                break
        spent_s = sum(node.turn.seconds for node in self.tree.nodes)
        if self.slow is None and spent_s > 0 and spent_s >= (self.deadline - self.opened) / 2:
            tokens = self.tree.sampled_tokens
            text = f"its replies took {spent_s:.3g} s for {tokens} tokens: {tokens / spent_s:.3g} tokens/s"
            return SlowWait(text, spent_s, given_up=False)
        return self.slow

    def forget_failures(self) -> None:
        """Forgets the failures of calls, as a reply is delivered."""
        self.engine_error = self.restart_reason = self.context_overflow = self.slow = None

    def note_refusal(self, refusal: ApiError) -> None:
        self.refused_calls += 1
        self.last_refusal = str(refusal)

    def check_open(self, now: float) -> None:
        if self.closed is not None:
            raise session_closed(self.closed)
        if now >= self.deadline:
            raise session_closed("its deadline passed")

    def close(self, reason: str) -> None:
        """Refuses further calls and cancels running ones."""
        if self.closed is None:
            self.closed = reason
        # With the first reason, also if the session is closed again for another.
        self.calls.cancel_all(session_closed(self.closed))
        self.tool_calls.cancel_all()
        self.body_prefixes.clear()
        for affinity in (self.affinity, *self.affinities.values()):
            affinity.release()

    def stop(self, reason: str) -> None:
        """Closes the session and cancels its reward, before it is deleted."""
        # Cleared first: the end of a session is announced once, though `stop` runs again as it is
        # forgotten.
        on_stop, self.on_stop = self.on_stop, None
        if self.ending is None and on_stop is not None:
            on_stop(self)
        self.close(reason)
        # Those that wait for a trajectory would otherwise wait for one that never comes.
        self.ended.set()
        if self.finishing is not None:
            self.finishing.cancel()

    def oldest_version(self) -> int | None:
        """Returns the oldest policy version among its trainable turns so far; None if there is none."""
        if self.trajectory is not None:
            return self.trajectory.oldest_version()
        versions = [node.turn.oldest_version() for node in self.tree.nodes if node.turn.trainable]
        return min((version for version in versions if version is not None), default=None)


def decide_outcome(session: GatewaySession, report: FinishReport, now: float) -> SessionResult:
    """Returns the result of a session that was finished.

    A reported failure becomes `infra_error` if an engine had failed or the gateway had lost a reply,
    `truncated` if the session had used up a limit, and `timeout` if its call waited for engines that serve.
    """
    outcome, error = _outcome(session, report.outcome, now)
    slow = _slow_wait(session, report, outcome, now)
    error, metrics = report.error or error, report.metrics
    if slow is not None:
        outcome, metrics = Outcome.TIMEOUT, {**metrics, ENGINE_WAIT_S: slow.seconds}
        deadline_s = session.deadline_s or session.deadline - session.opened
        error = f"{slow.text}; agent.deadline_s = {deadline_s:g}" + (f"\n{error}" if error else "")
    return SessionResult(outcome, error, now, report.output, report.reward, metrics, reported=report.outcome)


def _slow_wait(
    session: GatewaySession, report: FinishReport, outcome: Outcome, now: float
) -> SlowWait | None:
    """Returns the wait for engines that serve which ended the episode; None if something else did.

    An agent that raises as its client gave up waiting has an error that names a timeout.
    """
    if outcome is Outcome.TIMEOUT:
        return session.waits(now)
    slow = session.slow
    if slow is None or not (outcome is Outcome.AGENT_ERROR or outcome.trainable):
        return None
    if slow.given_up and (outcome.trainable or not _TIMED_OUT.search(report.error or "timeout")):
        return None
    return slow


def _outcome(session: GatewaySession, reported: Outcome | None, now: float) -> tuple[Outcome, str | None]:
    """Returns the outcome, and the error if there is one."""
    limit = session.exhausted_budget or session.context_overflow
    if reported is not None and reported not in (Outcome.COMPLETED, Outcome.TRUNCATED):
        # A timeout adds up over all calls, so an outage that was overcome may have caused it; an error
        # follows the last call.
        lost = session.engine_outage if reported is Outcome.TIMEOUT else session.engine_error
        infra = lost or session.restart_reason
        if reported in (Outcome.AGENT_ERROR, Outcome.TIMEOUT) and infra is not None:
            return Outcome.INFRA_ERROR, infra
        if reported is Outcome.AGENT_ERROR and limit is not None:
            return Outcome.TRUNCATED, limit
        return reported, None
    if now >= session.deadline:
        if session.engine_outage is not None:
            return Outcome.INFRA_ERROR, session.engine_outage
        return Outcome.TIMEOUT, "the session's deadline passed before it was finished"
    if session.engine_error is not None:
        return Outcome.INFRA_ERROR, session.engine_error
    if limit is not None:
        return Outcome.TRUNCATED, limit
    newest = session.tree.newest()
    if newest is None:
        if session.refused_calls:
            calls = "only call was" if session.refused_calls == 1 else f"{session.refused_calls} calls were"
            return Outcome.AGENT_ERROR, (
                f"no call of the agent was answered: its {calls} refused, the last one with: "
                f"{session.last_refusal}"
            )
        return Outcome.AGENT_ERROR, (
            "the agent never called the gateway, or never received a reply: "
            "it must use the session's base_url and api_key"
        )
    if newest.turn.exempt is not None:
        return Outcome.AGENT_ERROR, (
            f"every call of the agent is exempt from training, the last one by its {newest.turn.exempt}"
        )
    return (Outcome.TRUNCATED if newest.turn.finish_reason == "length" else Outcome.COMPLETED), None


def trajectory_of(session: GatewaySession, ending: SessionResult) -> Trajectory:
    """Returns an ended session's trajectory, without its reward."""
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
        client=session.client,
        tool_calls=list(session.tool_calls.recorded),
    )


def check_limits(session: GatewaySession, now: float) -> int | None:
    """Returns the number of tokens that the next call may sample, or None if unlimited. `now` is on the event
    loop's clock. Raises ApiError if a budget is exhausted."""
    limits = session.limits
    running = len(session.calls.running)
    if limits.turns is not None and (turns := session.tree.replies() + running) >= limits.turns:
        raise _budget_exceeded(session, f"turns: {turns} of {limits.turns}")
    if limits.seconds is not None and (seconds := now - session.opened) >= limits.seconds:
        raise _budget_exceeded(session, f"seconds: {seconds:.0f} of {limits.seconds:g}")
    left = None
    if limits.tokens is not None:
        tokens = session.tree.sampled_tokens
        left = limits.tokens - tokens
        if left <= 0:
            raise _budget_exceeded(session, f"tokens: {tokens} of {limits.tokens}")
    if limits.calls is not None and running >= limits.calls:
        raise ApiError(
            f"this session has {running} calls in progress (limit {limits.calls}); retry when one has ended",
            status=429,
            type="too_many_calls",
            code="too_many_calls",
            retryable=True,
        )
    return left


def check_tool_calls(session: GatewaySession) -> None:
    """Raises ApiError if the session may call no more tools."""
    calls, limit = session.tool_calls, session.limits.tool_calls
    if limit is not None and (number := len(calls.recorded) + len(calls.running)) >= limit:
        raise _budget_exceeded(session, f"tool calls: {number} of {limit}")
    if calls.size >= MAX_RECORDED:
        raise _budget_exceeded(session, f"recorded tool calls: {calls.size} of {MAX_RECORDED} bytes")


def _budget_exceeded(session: GatewaySession, what: str) -> ApiError:
    session.exhausted_budget = f"the session's budget is exhausted ({what})"
    return ApiError(
        f"{session.exhausted_budget}; finish the session", status=403, type="budget", code="budget_exceeded"
    )
