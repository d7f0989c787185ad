"""Distributes agent runs over several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, Unpack

from tidegate.errors import unwrapped
from tidegate.trainer.processes.agent_worker import Access, AgentResult
from tidegate.types import TaskView


class AgentRunner(Protocol):
    """Runs agents: an `AgentWorker`, its remote counterpart, or an `AgentPool`."""

    async def open(self) -> None:
        """Wait until the agent is loaded. Raises ConfigError, StartError."""

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult: ...

    async def close(self) -> None: ...


class AgentPool:
    """Assigns each run to the member with the fewest runs."""

    def __init__(self, members: Sequence[AgentRunner]) -> None:
        self.members = list(members)
        self._runs = [0] * len(self.members)

    async def open(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(member.open())
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult:
        """As `AgentWorker.run`."""
        index = self._runs.index(min(self._runs))
        self._runs[index] += 1
        try:
            return await self.members[index].run(job_id, view, **access)
        finally:
            self._runs[index] -= 1

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))
