"""The processes on other nodes as the run sees them: like its own, with an actor in between.

Ray starts a lost actor again, perhaps on another node, and what it owned is started anew in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import ray

from tidegate.errors import StartError
from tidegate.service.service import READY_S
from tidegate.trainer.cluster.actor_calls import ANSWER_S, LostError, answer
from tidegate.trainer.cluster.actors import StartCommand
from tidegate.trainer.cluster.environment import ClusterNode
from tidegate.trainer.cluster.file_transfer import FileBundle
from tidegate.trainer.processes.agent_worker import MAX_RESTARTS, Access, AgentResult
from tidegate.trainer.processes.provider import CurrentWeights
from tidegate.types import Outcome, TaskView

LOST_S = 60.0
"""How long a lost actor may take to come back: what it left behind (an address, a lock) is free by then."""
PAUSE_S = 0.5
BEYOND_S = 30.0
"""An actor that says nothing of an agent so long after its deadline is taken for lost."""

Send = Callable[[Path], Awaitable[FileBundle]]
"""A directory's files, on their way to nodes that do not see it."""


class RemoteProcess:
    """An actor, and what is known of it."""

    def __init__(self, name: str, actor: Any, home: ClusterNode, logs: Path) -> None:
        self.name = name
        self.shares = False
        """Whether it sees the run's directory."""
        self._actor = actor
        self._home = home
        self._logs = logs
        self._gathering = asyncio.Lock()
        self._known: dict[Path, int] = {}
        """How many bytes of each log on its node are here. An actor that is made again writes others."""

    async def arrive(self, within_s: float) -> None:
        """Wait until it is there, and look whether it is as this node. Raises StartError."""
        node, self.shares = await answer(self._actor.about.remote(), self.name, within_s)
        unlike = node.unlike(self._home)
        if unlike is not None:
            raise StartError(f"{self.name} cannot run: {unlike}")

    async def gather_logs(self) -> None:
        """Add to the run's logs what is new in those of the node. Raises StartError, OSError."""
        if self.shares:
            return
        async with self._gathering:  # else two would ask for the same
            news: Mapping[Path, bytes] = await answer(self._actor.logs.remote(self._known), self.name)
            await asyncio.to_thread(self._write, news)

    def _write(self, news: Mapping[Path, bytes]) -> None:
        for file, text in news.items():
            with (self._logs / file.name).open("ab") as log:
                log.write(text)
            self._known[file] = self._known.get(file, 0) + len(text)

    async def end(self) -> None:
        """End what it owns, take its last logs, and let it go."""
        with contextlib.suppress(StartError, OSError):  # one that is lost has ended
            await answer(self._actor.stop.remote(), self.name)
            await self.gather_logs()
            await answer(self._actor.leave.remote(), self.name)
        ray.kill(self._actor)

    async def back(self, start: Callable[[], Awaitable[object]]) -> None:
        """Start again after a loss, as soon as that is possible. Raises StartError."""
        deadline = time.monotonic() + LOST_S
        while True:
            try:
                await start()
                return
            except StartError as error:
                if time.monotonic() > deadline or (isinstance(error, LostError) and error.for_good):
                    raise
            await asyncio.sleep(PAUSE_S)


class RemoteServer(RemoteProcess):
    """An engine or a gateway (`parts.Server`)."""

    def __init__(
        self,
        name: str,
        actor: Any,
        home: ClusterNode,
        logs: Path,
        *,
        live: CurrentWeights | None = None,
        snapshot_weights: CurrentWeights | None = None,
        send: Send | None = None,
        port: int | None = None,
        ready_s: float = READY_S,
    ) -> None:
        """Create an engine or a gateway.

        A `port` keeps the address across restarts. An engine needs `live`, the weights to start with,
        `snapshot_weights`, a copy of them that is kept during a long start, and `send`.
        """
        super().__init__(name, actor, home, logs)
        self.url = ""
        self.restarts = 0
        self._live, self._pinned, self._send = live, snapshot_weights, send
        self._port = port
        self._ready_s = ready_s
        self._words = ""
        self._lost = False

    async def start(self) -> str:
        """Returns its URL, once it serves. Raises StartError."""
        await self.arrive(self._ready_s)
        order = await self._order()
        self.url = await answer(self._actor.start.remote(order), self.name, self._ready_s + ANSWER_S)
        if self._port is not None:
            self._port = int(self.url.rpartition(":")[2])
        return self.url

    async def place(self, weights: Path) -> Path:
        """Where the weights of a directory here are on its node. Raises StartError, OSError."""
        if self.shares or self._send is None:
            return weights
        parcel = await self._send(weights)
        there: Path = await answer(self._actor.take.remote(parcel), self.name, self._ready_s)
        return there

    async def _order(self) -> StartCommand:
        if self._live is None or self._pinned is None or self._send is None:
            return StartCommand(self._port or 0)
        if self.shares:
            weights, version = self._pinned()
            return StartCommand(0, weights, version)
        weights, version = self._live()
        return StartCommand(0, await self._send(weights), version)

    async def wait_for_exit(self) -> str:
        """Wait for its end, or its actor's; returns how it ended, in words."""
        try:
            how, self._words = await answer(self._actor.wait_for_exit.remote(), self.name, None)
        except LostError as error:
            how, self._words, self._lost = f"the {error}", "what it said last is in Ray's logs", True
        return str(how)

    async def restart(self) -> None:
        self.restarts += 1
        if self._lost:
            await self.back(self.start)
            self._lost = False
        else:
            await self.start()

    async def stop(self) -> None:
        await self.end()

    def last_log_line(self) -> str:
        return self._words


class RemoteAgents(RemoteProcess):
    """A process of agents (`crew.Runner`)."""

    def __init__(self, name: str, actor: Any, home: ClusterNode, logs: Path) -> None:
        super().__init__(name, actor, home, logs)
        self._there = False
        self._losses = 0
        """In a row, with no run ended well in between."""
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        """Wait until it has loaded the agent. Raises ConfigError, StartError."""
        await self.arrive(READY_S)
        await answer(self._actor.open.remote(), self.name, READY_S)
        self._there = True

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult:
        """As `AgentWorker.run`. A run that is lost with its actor ends `cancelled`."""
        async with self._starting:
            if not self._there:
                await self.back(self.open)
        run = self._actor.run.remote(job_id, view, access)
        try:
            result: AgentResult = await answer(run, self.name, access["deadline_s"] + BEYOND_S)
        except LostError as error:
            self._lose(error)
            return AgentResult(Outcome.CANCELLED, error=str(error))
        except asyncio.CancelledError:
            self._actor.cancel.remote(job_id)
            raise
        if result.outcome is None:
            self._losses = 0
        return result

    def _lose(self, error: LostError) -> None:
        if not self._there:  # another run has seen the same loss
            return
        self._there = False
        self._losses += 1
        if self._losses > MAX_RESTARTS:
            raise StartError(f"{error}; {self._losses} times in a row") from error

    async def close(self) -> None:
        await self.end()


class RemoteRank(RemoteProcess):
    """A trainer rank (`followed.Following`)."""

    def __init__(self, name: str, actor: Any, home: ClusterNode, logs: Path, rank: int) -> None:
        super().__init__(name, actor, home, logs)
        self.rank = rank

    async def start(self) -> None:
        """Raises StartError, also where it does not see the run's directory: it reads checkpoints there."""
        await self.arrive(READY_S)
        if not self.shares:
            raise StartError(
                f"trainer rank {self.rank} does not see {self._logs.parent}: trainer ranks need it on a disk "
                "that their nodes share (run.dir), or seats on one node"
            )
        await answer(self._actor.start.remote(), self.name, READY_S + ANSWER_S)

    def send(self, message: object) -> None:
        """Of one that is dead `died` says so."""
        self._actor.send.remote(message)

    async def wait_for_exit(self) -> str:
        try:
            return str(await answer(self._actor.wait_for_exit.remote(), self.name, None))
        except LostError as error:
            return f"trainer rank {self.rank}: {error}"

    async def stop(self) -> None:
        await self.end()
