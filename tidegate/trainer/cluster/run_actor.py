"""Actor of the run itself: trainer rank 0, the loop and the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ray

from tidegate.errors import StartError
from tidegate.observer import ForwardingObserver, Observer
from tidegate.service.process_secrets import shield_process
from tidegate.trainer.cluster.actors import see_assigned_gpus
from tidegate.trainer.cluster.connect import ActorSlots
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode, SharedDirProbe, set_gloo_interface
from tidegate.trainer.cluster.provider import RayProcesses
from tidegate.trainer.preflight import set_nccl_memory
from tidegate.trainer.processes.provider import ProcessProvider

MAX_EVENTS = 10_000

Event = tuple[str, tuple[object, ...]]
"""A method of `Observer`, and its arguments."""


class RunJob(Protocol):
    """A job to run: `launch.Launch`."""

    async def run(self) -> int:
        """Run the job; returns its exit code. Raises TidegateError."""

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Constructor argument of the actor."""

    run: str
    run_dir: Path
    folder: Path
    """Working directory of the command."""
    environment: Mapping[str, str] = field(repr=False)
    make: Callable[[Observer, ProcessProvider], RunJob]


class RunActor:
    """Runs a job whose processes belong to other actors, which end with this one."""

    def __init__(self, spec: RunSpec, slots: ActorSlots) -> None:
        shield_process()
        os.environ.update(spec.environment)
        see_assigned_gpus()
        set_nccl_memory()
        self._spec = spec
        self._slots = slots
        self._node = ClusterNode(ray.util.get_node_ip_address())
        set_gloo_interface(self._node.address)
        self._relay = ObserverRelay()
        self._job: RunJob | None = None
        self._stopped = False

    async def about(self) -> ClusterNode:
        return self._node

    async def run(self) -> int:
        spec = self._spec
        if spec.folder.is_dir():
            os.chdir(spec.folder)
        elif not spec.run_dir.is_absolute():
            raise StartError(
                f"{spec.folder} does not exist on the run's node {self._node.address}: set run.dir "
                "and the other paths to absolute paths on that node"
            )
        provider = RayProcesses(self._slots, self._node, self._make_context, self._relay.note)
        self._job = await asyncio.to_thread(spec.make, self._relay, provider)  # torch takes seconds
        # The stop may have come while the job was being made.
        if self._stopped:
            self._job.stop()
        gathering = asyncio.create_task(provider.gather_logs())
        try:
            return await self._job.run()
        finally:
            gathering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gathering

    async def take_events(self) -> list[Event]:
        return self._relay.take_events()

    async def stop(self) -> None:
        self._stopped = True
        if self._job is not None:
            self._job.stop()

    def _make_context(self) -> ActorContext:
        spec = self._spec
        probe = SharedDirProbe.create(spec.run_dir.absolute())
        return ActorContext(spec.run, probe, spec.folder, spec.environment)


class ObserverRelay(ForwardingObserver):
    """Buffers events until the command that started the run fetches them; drops the oldest of too many."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def take_events(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def forward(self, method: str, *arguments: object) -> None:
        # Copies: the caller may change its own before they are fetched.
        copied = (dict(value) if isinstance(value, Mapping) else value for value in arguments)
        self._events.append((method, tuple(copied)))
