"""The run itself, as an actor: the first trainer rank, the loop and the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ray

from tidegate.errors import StartError
from tidegate.observer import Observer
from tidegate.service.secrecy import shield_process
from tidegate.trainer.cluster.actor_slots import ActorSlots
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode, SharedDirProbe, set_gloo_interface
from tidegate.trainer.cluster.observer_relay import ObserverRelay, Told
from tidegate.trainer.cluster.provider import RayProcesses
from tidegate.trainer.processes.provider import ProcessProvider


class RunJob(Protocol):
    """What is run: `launch.Launch`."""

    async def run(self) -> int:
        """The exit code. Raises TidegateError."""

    def stop(self) -> None:
        """Finish the step in hand."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the actor is made with."""

    run: str
    run_dir: Path
    folder: Path
    """The working directory of the command."""
    environment: Mapping[str, str] = field(repr=False)
    make: Callable[[Observer, ProcessProvider], RunJob]


class RunActor:
    """Runs a job whose processes are other actors', which end with this one."""

    def __init__(self, errand: RunSpec, seats: ActorSlots) -> None:
        shield_process()
        os.environ.update(errand.environment)
        self._errand = errand
        self._seats = seats
        self._node = ClusterNode(ray.util.get_node_ip_address())
        set_gloo_interface(self._node.address)
        self._relay = ObserverRelay()
        self._job: RunJob | None = None
        self._stopped = False

    async def about(self) -> ClusterNode:
        return self._node

    async def run(self) -> int:
        """The exit code. Raises TidegateError."""
        errand = self._errand
        if errand.folder.is_dir():
            os.chdir(errand.folder)
        elif not errand.run_dir.is_absolute():
            raise StartError(
                f"{errand.folder} is not on node {self._node.address}, where the run is: give run.dir and "
                "the other paths as they are there, from the root"
            )
        parts = RayProcesses(self._seats, self._node, self._pack, self._relay.note)
        self._job = await asyncio.to_thread(errand.make, self._relay, parts)  # torch takes seconds
        if self._stopped:
            self._job.stop()
        gathering = asyncio.create_task(parts.gather_logs())
        try:
            return await self._job.run()
        finally:
            gathering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gathering

    async def news(self) -> list[Told]:
        """What observers were told since the last time."""
        return self._relay.news()

    async def stop(self) -> None:
        """Finish the step in hand and commit."""
        self._stopped = True
        if self._job is not None:
            self._job.stop()

    def _pack(self) -> ActorContext:
        errand = self._errand
        mark = SharedDirProbe.leave(errand.run_dir.absolute())
        return ActorContext(errand.run, mark, errand.folder, errand.environment)
