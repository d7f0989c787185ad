"""The gateway: what the routes, whatever their dialect, are made of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from tidegate.errors import GatewayError
from tidegate.gateway.groups import GroupStore
from tidegate.gateway.metrics import Metrics, exposition
from tidegate.gateway.pool import EnginePool, PoolOptions
from tidegate.gateway.render import Renderer
from tidegate.gateway.rewards import Rewarder, Scorer
from tidegate.gateway.sessions import Session, Sessions, decide, hash_key, new_id, new_key
from tidegate.gateway.toolcalls import ToolParser
from tidegate.gateway.turns import Turns, model_context
from tidegate.types import Group, Outcome, Sampling, Split, Task, Trajectory

log = logging.getLogger("tidegate.gateway")
SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What one gateway is started with; durations in seconds."""

    model: Path
    """A directory with a tokenizer and its chat template."""
    model_name: str | None = None
    """What `/v1/models` lists; None: the directory's name."""
    engine_urls: list[str] = field(default_factory=list)
    admin_key: str | None = None
    tool_parser: ToolParser = "hermes"
    rewarders: Mapping[str, Rewarder] = field(default_factory=dict)
    """By environment name."""
    reward_timeout_s: float = 30.0
    session_deadline_s: float = 3600.0
    """Of a session that is opened without a deadline."""
    grace_s: float = 60.0
    """How long after its deadline a session may still be finished before it is forgotten."""
    retention_s: float = 3600.0
    """How long a finished session that is in no sealed group is kept."""
    pool: PoolOptions = field(default_factory=PoolOptions)

    @property
    def name(self) -> str:
        return self.model_name or self.model.resolve().name


class Gateway:
    """One gateway's state. Made anywhere; `start` and `close` bracket its work on one event loop."""

    def __init__(self, options: GatewayOptions, renderer: Renderer | None = None) -> None:
        self.options = options
        self.renderer = renderer or Renderer.load(options.model)
        self.instance = new_id()
        self.metrics = Metrics()
        self.sessions = Sessions()
        self.failed: str | None = None
        """Why a part of the gateway itself died; `/health` then says so."""
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.groups = GroupStore()
        self.scorer = Scorer(self.options.rewarders, self.options.reward_timeout_s)
        self.pool = EnginePool(self.options.pool, self._died)
        self.turns = Turns(
            self.renderer,
            self.pool,
            self.metrics,
            self.options.tool_parser,
            model_context(self.options.model),
        )
        await self.pool.start()
        for url in self.options.engine_urls:
            await self.pool.add(url)
        self._sweeper = asyncio.create_task(self._sweep(), name="session sweeper")
        self._sweeper.add_done_callback(self._sweeper_ended)

    async def close(self) -> None:
        for session in self.sessions.all():
            session.close("the gateway stops")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.pool.close()

    # -- sessions --------------------------------------------------------------------------------

    def open_session(
        self,
        *,
        task: Task | None = None,
        env: str | None = None,
        split: Split = "train",
        sampling: Sampling | None = None,
        deadline_s: float | None = None,
        group_id: str | None = None,
        slot: int | None = None,
        seed: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, which is nowhere else. Raises GatewayError."""
        sampling = sampling or Sampling()
        if split == "train" and (sampling.temperature <= 0 or sampling.top_p != 1 or sampling.top_k > 0):
            raise GatewayError(
                "split train needs temperature > 0, top_p 1 and top_k off: otherwise the logprobs are not "
                "those of a distribution that can be trained on",
                status=400,
            )
        if group_id is not None and (self.groups.get(group_id) or self.groups.done(group_id)):
            raise GatewayError(f"group {group_id} takes no more sessions", status=410)
        _check_storable(env, group_id, slot, metadata, task and (task.id, task.env))
        now = asyncio.get_running_loop().time()
        key = new_key()
        session = Session(
            id=new_id(),
            key_hash=hash_key(key),
            task=task,
            env=env or (task.env if task is not None else ""),
            split=split,
            sampling=sampling,
            opened=now,
            deadline=now + (deadline_s if deadline_s is not None else self.options.session_deadline_s),
            group_id=group_id,
            slot=slot,
            seed=seed,
            metadata=metadata or {},
        )
        self.sessions.add(session)
        return session, key

    def session(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        return session

    def post_reward(self, session_id: str, name: str, value: float) -> None:
        session = self.session(session_id)
        if session.closed is not None:
            raise GatewayError(f"session {session_id} is over ({session.closed})", status=410)
        session.rewards[name] = value

    async def finish(
        self,
        session_id: str,
        *,
        output: str | None = None,
        outcome: Outcome | None = None,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        error: str | None = None,
    ) -> Trajectory:
        """End a session: refuse further calls, reward it, keep its trajectory. Repeating it changes
        nothing. Raises GatewayError where there is no such session (any more)."""
        session = self.session(session_id)
        if session.trajectory is not None:
            return session.trajectory
        if session.finishing is None:
            ended = asyncio.get_running_loop().time()
            base, why = decide(session, outcome, ended)
            session.close("it was finished")
            trajectory = self._trajectory(session, base, error or why, ended)
            trajectory.output, trajectory.metrics = output, metrics or {}
            session.finishing = asyncio.create_task(self._reward(session, trajectory, reward, ended))
        try:
            return await asyncio.shield(session.finishing)
        except asyncio.CancelledError:
            if session.finishing.cancelled():
                raise GatewayError(f"session {session_id} was deleted meanwhile", status=404) from None
            raise

    def _trajectory(self, session: Session, outcome: Outcome, error: str | None, now: float) -> Trajectory:
        newest = session.tree.newest()
        return Trajectory(
            session_id=session.id,
            task_id=session.task.id if session.task is not None else "",
            env=session.env,
            split=session.split,
            outcome=outcome,
            turns=session.tree.turns(),
            group_id=session.group_id,
            slot=session.slot,
            error=error,
            seconds=now - session.opened,
            messages=session.tree.history(newest.turn.index) if newest is not None else [],
            metadata=session.metadata,
        )

    async def _reward(self, session: Session, trajectory: Trajectory, claimed: Any, now: float) -> Trajectory:
        await self.scorer.reward(trajectory, session.task, session.rewards, claimed, session.deadline - now)
        session.trajectory = trajectory
        session.forget_at = asyncio.get_running_loop().time() + self.options.retention_s
        self.metrics.outcomes[trajectory.outcome.value] += 1
        return trajectory

    def forget(self, session_id: str) -> None:
        """Delete a session and what it recorded. Idempotent."""
        session = self.sessions.get(session_id)
        if session is not None:
            self.sessions.forget(session)

    async def _sweep(self) -> None:
        """Expire what nobody finishes; groups that are sealed never expire."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = asyncio.get_running_loop().time()
            for session in self.sessions.all():
                if session.trajectory is None and now >= session.deadline:
                    session.close("its deadline passed")
                sealed = session.group_id is not None and self.groups.get(session.group_id) is not None
                end = session.forget_at or session.deadline + self.options.grace_s
                if now >= end and not sealed:
                    log.info("session %s expired (%s)", session.id, session.state)
                    self.sessions.forget(session)

    def _sweeper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._died(f"the session sweeper ended: {task.exception()!r}")

    def _died(self, what: str) -> None:
        self.failed = what
        log.error("%s", what)

    # -- groups ----------------------------------------------------------------------------------

    async def seal(self, group_id: str, task_id: str, session_ids: list[str]) -> None:
        """Make a group of finished sessions ready. Idempotent. Raises GatewayError."""
        if self.groups.get(group_id) is not None:
            return
        if self.groups.done(group_id) is None and not session_ids:
            raise GatewayError(f"group {group_id} is sealed with no session", status=400)
        trajectories = []
        for session_id in session_ids if self.groups.done(group_id) is None else ():
            session = self.session(session_id)
            if session.trajectory is None or session.group_id != group_id:
                what = "not finished" if session.trajectory is None else f"of group {session.group_id!r}"
                raise GatewayError(f"session {session_id} is {what}", status=400)
            if session.trajectory.reward is None:
                raise GatewayError(
                    f"session {session_id} ended {session.trajectory.outcome}: it has no reward", status=400
                )
            trajectories.append(session.trajectory)
        _check_storable(task_id)
        trajectories.sort(key=lambda trajectory: -1 if trajectory.slot is None else trajectory.slot)
        await self.groups.seal(Group(group_id, task_id, trajectories))

    async def ack(self, epoch: int, lease_id: str, outcome: str) -> None:
        group_id = await self.groups.ack(epoch, lease_id, outcome)
        if group_id is not None:
            self._forget_members(group_id)

    def drop(self, group_id: str) -> int:
        """End a group and all of its sessions, live ones too; how many tokens they sampled. Idempotent."""
        sampled = sum(session.tree.sampled_tokens() for session in self.sessions.of_group(group_id))
        self.groups.drop(group_id)
        self._forget_members(group_id)
        return sampled

    def _forget_members(self, group_id: str) -> None:
        for session in self.sessions.of_group(group_id):
            self.sessions.forget(session)

    def list_groups(self) -> list[dict[str, Any]]:
        rows = []
        for group_id, members in self.sessions.groups().items():
            if self.groups.get(group_id) is None:
                known = [version for one in members if (version := one.oldest_version()) is not None]
                rows.append(_group_row(group_id, "live", min(known, default=None), [m.id for m in members]))
        for entry in self.groups.entries():
            ids = [trajectory.session_id for trajectory in entry.group.trajectories]
            rows.append(_group_row(entry.group.id, entry.state, entry.group.oldest_version(), ids))
        return rows

    # -- what it says of itself ------------------------------------------------------------------

    def prometheus(self) -> str:
        return exposition(self)


def _check_storable(*values: Any) -> None:
    """What goes into a trajectory must be fit for the wire; one that is not would block its lease."""
    try:
        msgpack.packb(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise GatewayError(f"this cannot be stored: {error}", status=400) from None


def _group_row(group_id: str, state: str, oldest: int | None, sessions: list[str]) -> dict[str, Any]:
    return {"id": group_id, "state": state, "oldest_version": oldest, "sessions": sessions}
