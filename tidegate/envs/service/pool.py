"""Distributes episodes and rewards over worker processes, and replaces those that exit or hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.envs.judge.judge import RewardJudge
from tidegate.envs.service.judging import judged, ranked, with_judge
from tidegate.envs.service.process import (
    CANCEL_S,
    CallError,
    CallTimeoutError,
    WorkerLostError,
    WorkerProcess,
)
from tidegate.errors import (
    ConfigError,
    RewardError,
    RewardUnavailableError,
    StartError,
    TidegateError,
    UnrewardedError,
)
from tidegate.service.backoff import back_off
from tidegate.settings.judge import JudgeSettings

log = logging.getLogger("tidegate.envs.service.pool")

SCORES_AT_ONCE = 16
"""Rewards that one worker computes at the same time; others queue."""
MAX_LOSSES = 2
"""Workers that may end while they compute one reward, before the reward counts as their cause."""
SWEEP_S = 0.5
REMEMBERED = 65_536
"""Number of lost episodes whose reason is kept."""
ENDED = "the episode has ended"
STATE_LOST = "the episode's state is lost"
NO_WORKER_S = 120.0
FIRST_S, LONGEST_S = 0.2, 30.0
"""Delays between starts of workers that fail."""


class NoEpisodeError(TidegateError):
    """There is no state of this episode, or it is lost."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of the environment service; durations are in seconds."""

    environment: Mapping[str, Any]
    """What a worker loads: `use`, `options`, `conversation_rewards` and `reward_range`."""
    workers: int
    reward_timeout_s: float
    call_timeout_s: float
    """Timeout of `setup`, of a tool and of `respond`."""
    judge: JudgeSettings | None = None
    """Judge of the episodes, with its rubric resolved."""
    judge_cache: Path | None = None
    """Database of its replies; None: in memory."""


@dataclass(slots=True)
class _Held:
    """An episode's place."""

    worker: WorkerProcess
    expires: float
    """Time on the event loop's clock at which its state is torn down."""


class WorkerPool:
    """The worker processes of one environment service."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.about: dict[str, Any] = {}
        """The environments by name, as the workers describe them."""
        self._workers: list[WorkerProcess] = []
        self._number = 0
        self._episodes: dict[str, _Held] = {}
        self._settings_up: dict[str, asyncio.Task[None]] = {}
        self._scores: dict[tuple[str, bytes], asyncio.Task[Any]] = {}
        """Scores in progress by episode and trajectory: a repeated request joins the first."""
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Condition()
        self._alone = asyncio.Semaphore(2)
        """Rewards that get a worker of their own."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._judge: RewardJudge | None = None
        self._ranks: dict[str, asyncio.Task[Any]] = {}
        """Rankings in progress by group."""

    async def start(self) -> None:
        """Starts the workers.

        Raises:
            ConfigError: The environments cannot be loaded, or a reward has the name of one of the judge's.
            StartError: The first workers do not start.
            StorageError: The judge's cache cannot be opened.
        """
        workers = [self._new() for _ in range(self.settings.workers)]
        results = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
        try:
            for error in results:
                if isinstance(error, BaseException):
                    raise error
            self.about = workers[0].about
            if self.settings.judge is not None:
                self._judge = RewardJudge(self.settings.judge, self.settings.judge_cache)
                self.about = with_judge(self.about, self._judge)
        except BaseException:
            await asyncio.gather(*(worker.kill() for worker in workers))
            raise
        for worker in workers:
            self._add(worker)
        self.own(self._sweep())

    async def close(self) -> None:
        """Tears the episodes down, within seconds, and ends the workers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*(self.teardown(name) for name in list(self._episodes)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        if self._judge is not None:
            await self._judge.close()

    # -- episodes --------------------------------------------------------------------------------

    async def setup(self, name: str, task: str, deadline_s: float, create: bool) -> None:
        """Makes an episode's state. Idempotent.

        Args:
            name: Name of the episode.
            task: Its task as JSON, as `Task.to_wire` returns it.
            deadline_s: Seconds after which the state is torn down at the latest.
            create: False: only check that the state is there.

        Raises:
            NoEpisodeError: The state is lost, or does not exist and is not to be made.
            CallError: `setup` raised.
            CallTimeoutError: It took too long.
            WorkerLostError: Its worker ended.
        """
        if self._lost.get(name, ENDED) != ENDED:
            raise NoEpisodeError(self._lost[name])
        if name in self._episodes and name not in self._settings_up:
            return
        if name not in self._settings_up:
            if not create:
                raise self._unknown(name)
            self._lost.pop(name, None)  # torn down before its agent began
            job = self.own(self._setup(name, task, deadline_s))
            self._settings_up[name] = job
            job.add_done_callback(lambda _: self._settings_up.pop(name, None))
        await asyncio.shield(self._settings_up[name])

    async def _setup(self, name: str, task: str, deadline_s: float) -> None:
        worker = await self._choose(lambda worker: len(worker.episodes))
        worker.episodes.add(name)
        expires = asyncio.get_running_loop().time() + deadline_s
        self._episodes[name] = _Held(worker, expires)
        try:
            await self._call(worker, "setup", self.settings.call_timeout_s, episode=name, task=task)
        except BaseException as error:
            self._forget(name, f"the set-up of the episode failed: {error}")
            raise

    async def call(self, name: str, op: str, **arguments: Any) -> Any:
        """Runs `tool` or `respond` of an episode.

        Raises:
            NoEpisodeError: There is no such episode, or its state is lost.
            CallError: The environment failed.
            CallTimeoutError: It took too long.
        """
        held = self._held(name)
        try:
            return await self._call(held.worker, op, self.settings.call_timeout_s, episode=name, **arguments)
        except WorkerLostError as error:
            raise NoEpisodeError(f"{error}; {STATE_LOST}") from None

    async def teardown(self, name: str) -> None:
        """Releases an episode's state. Idempotent; failures are logged."""
        if (setting_up := self._settings_up.get(name)) is not None:
            await asyncio.wait((setting_up,))
        held = self._episodes.get(name)
        if held is None:
            return
        self._forget(name, ENDED)
        try:
            await self._call(held.worker, "teardown", self.settings.call_timeout_s, episode=name)
        except TidegateError as error:
            log.warning("episode %s: teardown: %s", name, error)

    def _held(self, name: str) -> _Held:
        held = self._episodes.get(name)
        if held is None or name in self._settings_up:
            raise self._unknown(name)
        return held

    def _unknown(self, name: str) -> NoEpisodeError:
        restarted = f"the environment service has no state of the episode {name}: it was restarted"
        return NoEpisodeError(self._lost.get(name, restarted))

    def _forget(self, name: str, why: str) -> None:
        held = self._episodes.pop(name, None)
        if held is not None:
            held.worker.episodes.discard(name)
        self._lost[name] = why
        if len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    # -- rewards ---------------------------------------------------------------------------------

    async def score(self, name: str, stateful: bool, task: str, trajectory: bytes) -> Any:
        """Computes the rewards of an episode, with its state or, without one, in any worker, and judges it.

        Raises:
            RewardError: A reward failed, took too long, or ended its process twice.
            NoEpisodeError: The episode's state is lost.
        """
        key = (name, trajectory)
        if key not in self._scores:
            scored = self._scored(name, stateful, task, trajectory)
            if self._judge is not None:
                scored = judged(self._judge, scored, self.about, task, trajectory)
            self._scores[key] = job = self.own(scored)
            job.add_done_callback(lambda _: self._scores.pop(key, None))
        return await asyncio.shield(self._scores[key])

    async def rank(self, group: str, task: str, trajectories: Sequence[bytes]) -> Any:
        """Has the judge compare the episodes of a group. Raises RewardError."""
        if self._judge is None:
            raise RewardError("there is no judge to rank the group")
        if group not in self._ranks:
            self._ranks[group] = job = self.own(ranked(self._judge, task, trajectories))
            job.add_done_callback(lambda _: self._ranks.pop(group, None))
        return await asyncio.shield(self._ranks[group])

    async def _scored(self, name: str, stateful: bool, task: str, trajectory: bytes) -> Any:
        arguments = {"episode": name, "task": task, "trajectory": trajectory}
        losses, alone = 0, False
        while True:
            held = self._held(name) if stateful else None
            try:
                if held is not None:
                    return await self._score(held.worker, arguments)
                return await self._score_anywhere(arguments, alone)
            except CallError as error:
                kinds = {"unrewarded": UnrewardedError, "unavailable": RewardUnavailableError}
                raise kinds.get(error.kind, RewardError)(str(error)) from None
            except CallTimeoutError as error:
                raise RewardError(f"the reward: {error} (env.reward_timeout_s)") from None
            except WorkerLostError as error:
                if stateful:
                    raise NoEpisodeError(f"{error}; {STATE_LOST}") from None
                losses, alone = losses + 1, True  # alone, so that no other reward can be the cause
                if losses >= MAX_LOSSES:
                    raise RewardError(f"{error}, {losses} times while it computed this reward") from None

    async def _score_anywhere(self, arguments: Mapping[str, Any], alone: bool) -> Any:
        if not alone:
            worker = await self._choose(lambda worker: worker.scoring, SCORES_AT_ONCE)
            return await self._score(worker, arguments)
        async with self._alone:
            worker = self._new()
            worker.retired = True
            await worker.start()
            self._add(worker)
            return await self._score(worker, arguments)

    async def _score(self, worker: WorkerProcess, arguments: Mapping[str, Any]) -> Any:
        worker.scoring += 1
        try:
            return await self._call(worker, "score", self.settings.reward_timeout_s, **arguments)
        finally:
            worker.scoring -= 1
            async with self._changed:
                self._changed.notify()  # one place is free

    # -- workers ---------------------------------------------------------------------------------

    async def _call(self, worker: WorkerProcess, op: str, timeout_s: float, **arguments: Any) -> Any:
        """Calls a worker; one in which a call hangs gets no further work, or is killed.

        If it does not respond at all, it is not known which of its calls is the cause: then all but a single
        one raise WorkerLostError.
        """
        try:
            return await worker.call(op, timeout_s, **arguments)
        except CallTimeoutError as error:
            if not error.stuck:
                raise
            why = f"{op} {error}"
            if worker.responsive:
                self._retire(worker, why)
                raise
            others = worker.episodes - {arguments["episode"]}
            shared = bool(others) or worker.scoring > (op == "score")
            await self._kill(worker, f"it does not respond, and {why}")
            if shared:
                raise WorkerLostError(f"{worker.title} was killed: a call in it hung") from None
            raise

    async def _choose(self, load: Any, limit: float = float("inf")) -> WorkerProcess:
        """Returns the responsive worker with the least load; waits for one below the limit.

        Raises:
            WorkerLostError: For NO_WORKER_S no worker could be started.
        """
        last = asyncio.get_running_loop().time()
        async with self._changed:
            while True:
                usable = [w for w in self._workers if not w.retired and w.responsive and load(w) < limit]
                if usable:
                    return min(usable, key=load)
                now = asyncio.get_running_loop().time()
                if any(not worker.retired for worker in self._workers):
                    last = now
                elif now - last > NO_WORKER_S:
                    raise WorkerLostError(f"no worker could be started for {NO_WORKER_S:g} s; see the log")
                await self._changed.wait()

    def _new(self) -> WorkerProcess:
        self._number += 1
        return WorkerProcess(self._number, self.settings.environment)

    def _add(self, worker: WorkerProcess) -> None:
        self._workers.append(worker)
        self.own(self._watch(worker))

    async def _watch(self, worker: WorkerProcess) -> None:
        """Waits for a worker's end; then its episodes are lost and another one takes its place."""
        await worker.exited.wait()
        how = await worker.wait_for_exit()
        self._workers.remove(worker)
        for name in list(worker.episodes):
            self._forget(name, f"{how}; {STATE_LOST}")
        if not worker.retired:
            log.warning("%s; starting another one", how)
            await self._replace()
        await self._notify()

    async def _replace(self) -> None:
        failures = 0
        while True:
            worker = self._new()
            try:
                await worker.start()
            except (ConfigError, StartError) as error:
                log.error("%s", error)
                failures = await back_off(failures, FIRST_S, LONGEST_S)
            else:
                self._add(worker)
                await self._notify()
                return

    def _retire(self, worker: WorkerProcess, why: str) -> None:
        if not worker.retired:
            log.warning("%s is replaced: %s", worker.title, why)
            worker.retired = True
            self.own(self._replace())

    async def _kill(self, worker: WorkerProcess, why: str) -> None:
        log.warning("%s is killed: %s", worker.title, why)
        await worker.kill()

    async def _sweep(self) -> None:
        """Tears down expired episodes, ends retired workers, and kills those that do not respond."""
        longest = max(self.settings.reward_timeout_s, self.settings.call_timeout_s)
        longest += SWEEP_S + 2 * CANCEL_S  # after the call's own timeout, which identifies the call at fault
        usable = 0
        while True:
            await asyncio.sleep(SWEEP_S)
            before, usable = usable, sum(worker.responsive for worker in self._workers)
            async with self._changed:  # a worker that responds again notifies nobody
                self._changed.notify(len(self._tasks) if usable != before or usable == 0 else 1)
            now = asyncio.get_running_loop().time()
            for name, held in list(self._episodes.items()):
                if now >= held.expires:
                    self.own(self.teardown(name))
            for worker in list(self._workers):
                if worker.silent_s() > longest:
                    self.own(self._kill(worker, f"it did not respond for {worker.silent_s():.0f} s"))
                elif worker.retired and not worker.episodes and not worker.scoring:
                    self.own(worker.kill())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def own(self, job: Any) -> asyncio.Task[Any]:
        """Starts a task that ends with the pool; its failure is logged."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TidegateError):  # those are the callers'
            log.error("an internal task failed", exc_info=error)
