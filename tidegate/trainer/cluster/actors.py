"""What runs on a cluster's nodes: each of these actors owns what a run on one machine owns itself.

An actor that is started again by Ray is empty: the run, which learns of its loss, has it start what it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray

from tidegate.service.secrecy import shield_process
from tidegate.service.service import Service
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode, set_gloo_interface
from tidegate.trainer.cluster.file_transfer import FileBundle, FileCache
from tidegate.trainer.cluster.temp_dir import TempDir
from tidegate.trainer.processes.agent_worker import Access, AgentResult, AgentWorker
from tidegate.trainer.processes.provider import CurrentWeights
from tidegate.trainer.processes.rank_process import LocalRankProcess
from tidegate.types import TaskView


class ProcessActor:
    """An actor with a directory for what it keeps: the run's where it sees that, else one of this node."""

    def __init__(self, luggage: ActorContext) -> None:
        shield_process()
        luggage.unpack()
        self.node = ClusterNode(ray.util.get_node_ip_address())
        set_gloo_interface(self.node.address)
        self.shares = luggage.mark.seen()
        self._scratch = None if self.shares else TempDir(f"tidegate-{luggage.run}")
        self.directory = luggage.mark.directory if self._scratch is None else self._scratch.path

    async def about(self) -> tuple[ClusterNode, bool]:
        """Where this is, and whether the run's directory is seen from here."""
        return self.node, self.shares

    async def logs(self, known: Mapping[Path, int]) -> dict[Path, bytes]:
        """What logs of this node's own directory have beyond so many bytes of each."""
        if self.shares:
            return {}
        files = sorted((self.directory / "logs").glob("*.log"))
        return {file: _beyond(file, known.get(file, 0)) for file in files}

    async def stop(self) -> None:
        """End what this owns; may be called twice."""

    async def leave(self) -> None:
        """End what this owns, and remove what it kept here."""
        await self.stop()
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.remove)


@dataclass(frozen=True, slots=True)
class StartCommand:
    """What a server is to be started with."""

    port: int = 0
    """0 takes a free one; another one stays the same, wherever the actor is started again."""
    weights: Path | FileBundle | None = None
    version: int = 0


class Build(Protocol):
    """How a server is made: in a directory, listening at a host and port, with what is live."""

    def __call__(self, directory: Path, host: str, port: int, live: CurrentWeights) -> Service: ...


class ServerActor(ProcessActor):
    """Owns an engine or a gateway."""

    def __init__(self, luggage: ActorContext, build: Build) -> None:
        super().__init__(luggage)
        self._build = build
        self._shelf = FileCache(self.directory / "weights")
        self._live = (Path(), 0)
        self._service: Service | None = None

    async def start(self, order: StartCommand) -> str:
        """Start it, again where it has run already; returns its URL. Raises StartError."""
        if order.weights is not None:
            self._live = (await self.take(order.weights), order.version)
        if self._service is None:
            self._service = self._build(self.directory, self.node.address, order.port, lambda: self._live)
        else:
            await self._service.stop()
        return await self._service.start()

    async def take(self, weights: Path | FileBundle) -> Path:
        """Where these weights are on this node."""
        return weights if isinstance(weights, Path) else await self._shelf.unpack(weights)

    async def wait_for_exit(self) -> tuple[str, str]:
        """Wait for its end; how it ended, and its last words."""
        assert self._service is not None
        how = await self._service.wait_for_exit()
        return how, self._service.last_log_line()

    async def stop(self) -> None:
        if self._service is not None:
            await self._service.stop()


class AgentActor(ProcessActor):
    """Owns a process that runs agents."""

    def __init__(self, luggage: ActorContext, name: str, use: str, options: Mapping[str, Any]) -> None:
        super().__init__(luggage)
        self._worker = AgentWorker(use, options, self.directory / "logs" / f"{name}.log")
        self._runs: dict[str, asyncio.Task[AgentResult]] = {}

    async def open(self) -> None:
        """As `AgentWorker.open`."""
        await self._worker.open()

    async def run(self, job_id: str, view: TaskView, access: Access) -> AgentResult:
        """As `AgentWorker.run`; ends by `cancel`, too."""
        task = asyncio.ensure_future(self._worker.run(job_id, view, **access))
        self._runs[job_id] = task
        try:
            return await task
        finally:
            del self._runs[job_id]

    async def cancel(self, job_id: str) -> None:
        """End a run that nobody waits for any more."""
        if job_id in self._runs:
            self._runs[job_id].cancel()

    async def stop(self) -> None:
        await self._worker.close()


class RankActor(ProcessActor):
    """Owns a trainer rank other than the first."""

    def __init__(self, luggage: ActorContext, rank: int) -> None:
        super().__init__(luggage)
        self._rank = LocalRankProcess(rank, self.directory / "logs")
        self._sending = asyncio.Lock()

    async def start(self) -> None:
        """Raises StartError."""
        await self._rank.start()

    async def send(self, message: object) -> None:
        """In the order of the calls; raises BrokenPipeError where the rank is dead."""
        async with self._sending:
            await asyncio.to_thread(self._rank.send, message)

    async def wait_for_exit(self) -> str:
        """Wait for its end; how it ended."""
        return await self._rank.wait_for_exit()

    async def stop(self) -> None:
        await self._rank.stop()


def _beyond(file: Path, start: int) -> bytes:
    with file.open("rb") as log:
        log.seek(start)
        return log.read()
