"""The gateway: what the routes, whatever their dialect, are made of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from tidegate.errors import GatewayError
from tidegate.gateway.certify import certify
from tidegate.gateway.exposition import exposition
from tidegate.gateway.formats.registry import choose
from tidegate.gateway.groups import GroupStore
from tidegate.gateway.journal import Journal, Recovered
from tidegate.gateway.journal_disk import DiskJournal
from tidegate.gateway.limits import Limits
from tidegate.gateway.metrics import Metrics
from tidegate.gateway.pool import EnginePool, PoolOptions
from tidegate.gateway.render import Renderer
from tidegate.gateway.rewards import Rewarder, Scorer
from tidegate.gateway.sessions import (
    Ending,
    Session,
    Sessions,
    decide,
    hash_key,
    new_id,
    new_key,
    trajectory_of,
)
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
    tool_parser: str = "auto"
    """The form of the model's tool calls, by its name in `tidegate.gateway.formats`; `auto`: the one that its
    chat template writes; `none`: calls stay text."""
    rewarders: Mapping[str, Rewarder] = field(default_factory=dict)
    """By environment name."""
    reward_timeout_s: float = 30.0
    session_deadline_s: float = 3600.0
    """Of a session that is opened without a deadline."""
    grace_s: float = 60.0
    """How long after its deadline a session may still be finished before it is forgotten."""
    retention_s: float = 3600.0
    """How long a finished session that is in no sealed group is kept."""
    limits: Limits = field(default_factory=Limits)
    """Of a session that is opened without its own."""
    journal: Path | None = None
    """The directory in which everything is kept; None: all is lost with the process."""
    pool: PoolOptions = field(default_factory=PoolOptions)
    mark: str = ""
    """What its ids and keys begin with, so that a front finds the shard that knows them."""

    @property
    def name(self) -> str:
        return self.model_name or self.model.resolve().name


class Gateway:
    """One gateway's state. Made anywhere; `start` and `close` bracket its work on one event loop."""

    def __init__(self, options: GatewayOptions, renderer: Renderer | None = None) -> None:
        self.options = options
        self.journal = Journal() if options.journal is None else DiskJournal(options.journal)
        self.renderer = renderer or Renderer.load(options.model)
        self.form, self.form_why = choose(options.tool_parser, self.renderer.write)
        self.model_name = options.name
        """What replies call the model; asked of the file system once, not with every reply."""
        self.instance = new_id()
        self.metrics = Metrics()
        self.sessions = Sessions()
        self._failed: str | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def failed(self) -> str | None:
        """What is wrong with the gateway itself; `/health` then says so."""
        return self._failed or self.journal.problem

    async def start(self) -> None:
        """Begin where the journal ends. Raises StartError where it cannot be used."""
        certificate = await asyncio.to_thread(certify, self.renderer)
        log.info("chat template: %s", certificate.line())
        log.info("tool calls: %s, %s", self.form.name, self.form_why)
        recovered = self.journal.start()
        self.groups = GroupStore(
            self.journal, self.sessions.of_group, recovered, self.options.mark, self._cancel_older
        )
        self.scorer = Scorer(self.options.rewarders, self.options.reward_timeout_s)
        self.pool = EnginePool(self.options.pool, self._died)
        self.turns = Turns(
            self.renderer,
            self.pool,
            self.metrics,
            self.journal,
            self.form,
            model_context(self.options.model),
        )
        await self.pool.start()
        for url in self.options.engine_urls:
            await self.pool.add(url)
        for url, control in recovered.engines.items():
            await self.pool.add(url, control)
        self._take_up(recovered)
        self._sweeper = asyncio.create_task(self._sweep(), name="session sweeper")
        self._sweeper.add_done_callback(self._sweeper_ended)

    async def close(self) -> None:
        for session in self.sessions.all():
            session.close("the gateway stops")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.pool.close()
        await self.journal.close()

    def _take_up(self, recovered: Recovered) -> None:
        """Go on with the sessions that another gateway began; those that it was ending are ended."""
        for session in recovered.sessions:
            self.sessions.add(session)
            if session.trajectory is None and session.ending is not None:
                self._finishing(session, session.ending)
        self._cancel_older()
        if recovered.sessions:
            log.info("took up %d sessions from the journal", len(recovered.sessions))

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(
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
        limits: Limits | None = None,
        epoch: int | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, of which only a hash is kept. Raises GatewayError.

        One that a trainer opens carries its epoch, and ends `cancelled` when a newer trainer comes.
        """
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
        await self.groups.enter(epoch)
        now = asyncio.get_running_loop().time()
        key = new_key(self.options.mark)
        session = Session(
            id=new_id(self.options.mark),
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
            limits=(limits or Limits()).over(self.options.limits),
            number=self.sessions.number(),
            epoch=epoch,
        )
        await self.journal.opened(session)
        self.sessions.add(session)
        if self._orphaned(session):  # a newer trainer came meanwhile
            self._cancel(session)
        return session, key

    def session(self, session_id: str) -> Session:
        session = self.sessions.get(session_id)
        if session is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        return session

    async def post_reward(self, session_id: str, name: str, value: float, turn: int | None = None) -> None:
        """A part of the session's reward, or of one turn's; the same name again replaces it."""
        session = self.session(session_id)
        if session.closed is not None:
            raise GatewayError(f"session {session_id} is over ({session.closed})", status=410)
        _check_storable(name)
        if turn is None:
            session.rewards[name] = value
        elif turn < len(session.tree.nodes):
            session.turn_rewards.setdefault(turn, {})[name] = value
        else:
            raise GatewayError(
                f"session {session_id} has no turn {turn}; it has {len(session.tree.nodes)}", status=400
            )
        await self.journal.rewarded(session, name, value, turn)

    async def finish(
        self,
        session_id: str,
        *,
        output: str | None = None,
        outcome: Outcome | None = None,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        error: str | None = None,
        epoch: int | None = None,
    ) -> Trajectory:
        """End a session: refuse further calls, reward it, keep its trajectory. Repeating it changes
        nothing. Raises GatewayError where there is no such session (any more), or the trainer is over."""
        await self.groups.enter(epoch)
        session = self.session(session_id)
        if session.trajectory is not None:
            return session.trajectory
        if session.ending is None:
            now = asyncio.get_running_loop().time()
            session.tree.settle()
            base, why = decide(session, outcome, now)
            session.close("it was finished")
            session.ending = Ending(base, error or why, now, output, reward, metrics or {})
        finishing = session.finishing or self._finishing(session, session.ending)
        try:
            return await asyncio.shield(finishing)
        except asyncio.CancelledError:
            if finishing.cancelled():
                raise GatewayError(f"session {session_id} was deleted meanwhile", status=404) from None
            raise

    def _finishing(self, session: Session, ending: Ending) -> asyncio.Task[Trajectory]:
        task = asyncio.create_task(self._finish(session, ending), name=f"finish {session.id}")
        task.add_done_callback(lambda done: self._finish_ended(session, done))
        session.finishing = task
        return task

    async def _finish(self, session: Session, ending: Ending) -> Trajectory:
        await self.journal.closing(session)
        trajectory = trajectory_of(session, ending)
        left = session.deadline - ending.at
        await self.scorer.reward(trajectory, session.task, session.rewards, ending.claimed, left)
        forget_at = asyncio.get_running_loop().time() + self.options.retention_s
        await self.journal.finished(session, trajectory, forget_at)
        session.trajectory, session.forget_at = trajectory, forget_at
        self.metrics.outcomes[trajectory.outcome.value] += 1
        return trajectory

    def _finish_ended(self, session: Session, task: asyncio.Task[Trajectory]) -> None:
        """One that could not be written may be tried again: whoever waits for it is told."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session %s could not be finished: %s", session.id, error)
            session.finishing = None

    def _cancel_older(self) -> None:
        """End what an older trainer opened and will not finish any more: its agents died with it."""
        for session in filter(self._orphaned, self.sessions.all()):
            self._cancel(session)

    def _orphaned(self, session: Session) -> bool:
        return session.epoch is not None and session.epoch < self.groups.epoch and session.ending is None

    def _cancel(self, session: Session) -> None:
        why = f"the trainer of epoch {session.epoch}, which ran it, is over"
        session.close(why)
        # Whether a reply in doubt arrived nobody will ever know: it stays undelivered.
        session.ending = Ending(Outcome.CANCELLED, why, asyncio.get_running_loop().time())
        self._finishing(session, session.ending)

    async def forget(self, session_id: str) -> None:
        """Delete a session and what it recorded, for good. Idempotent. Raises GatewayError."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.group_id is not None and self.groups.get(session.group_id) is not None:
            raise GatewayError(
                f"session {session_id} is in the sealed group {session.group_id}: end the group", status=400
            )
        await self._forget([session])

    async def _forget(self, sessions: list[Session]) -> None:
        for session in sessions:
            session.stop("it was deleted")
        await self.journal.forgotten(sessions)
        for session in sessions:
            self.sessions.forget(session)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.expire(asyncio.get_running_loop().time())

    async def expire(self, now: float) -> None:
        """Forget what nobody finishes, and what was kept for long enough; a sealed group never expires."""
        expired = []
        for session in self.sessions.all():
            if session.trajectory is None and now >= session.deadline:
                session.close("its deadline passed")
            sealed = session.group_id is not None and self.groups.get(session.group_id) is not None
            end = session.forget_at
            if end is None:
                end = session.deadline + self.options.grace_s
            if now >= end and not sealed:
                log.info("session %s expired (%s)", session.id, session.state)
                expired.append(session)
        try:
            await self._forget(expired)
        except GatewayError as error:
            log.error("%d expired sessions are kept: %s", len(expired), error)

    def _sweeper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._died(f"the session sweeper ended: {task.exception()!r}")

    def _died(self, what: str) -> None:
        self._failed = what
        log.error("%s", what)

    # -- groups ----------------------------------------------------------------------------------

    async def seal(
        self, group_id: str, task_id: str, session_ids: list[str], epoch: int | None = None
    ) -> None:
        """Make a group of finished sessions ready. Idempotent. Raises GatewayError."""
        await self.groups.enter(epoch)
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
        await self.groups.seal(Group(group_id, task_id, trajectories), epoch)

    async def ack(self, epoch: int, lease_id: str, outcome: str) -> None:
        """End a lease, and with it the group and its sessions. Idempotent."""
        _check_storable(lease_id, outcome)
        for session in await self.groups.ack(epoch, lease_id, outcome):
            self.sessions.forget(session)

    async def drop(self, group_id: str, epoch: int | None = None) -> int:
        """End a group and all of its sessions, live ones too; how many tokens they sampled. Idempotent."""
        await self.groups.enter(epoch)
        for session in self.sessions.of_group(group_id):
            session.stop("its group was dropped")
        sampled = 0
        for session in await self.groups.drop(group_id, epoch):
            sampled += session.tree.sampled_tokens
            self.sessions.forget(session)
        return sampled

    # -- engines ---------------------------------------------------------------------------------

    async def add_engine(self, url: str, control: Sequence[str] = ()) -> None:
        """Take an engine in, here and after a restart. Idempotent."""
        await self.pool.add(url, control, wait_s=2.0)
        await self._note_engines()

    async def remove_engine(self, url: str) -> None:
        await self.pool.remove(url)
        await self._note_engines()

    async def _note_engines(self) -> None:
        await self.journal.engines({engine.url: list(engine.control) for engine in self.pool.engines()})

    def prometheus(self) -> str:
        return exposition(self)


def _check_storable(*values: Any) -> None:
    """What goes into a trajectory must be fit for the wire; one that is not would block its lease."""
    try:
        msgpack.packb(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise GatewayError(f"this cannot be stored: {error}", status=400) from None
