"""An agents' process as an evaluation runs it: real, supervised, without a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.evaluation.offers import AttemptServer
from tidegate.settings.run import AgentSettings
from tidegate.trainer.processes.agents import AgentProcess, supervise_agents
from tidegate.types import TaskView

SESSION = {"base_url": "http://gate/v1", "api_key": "key", "model": "policy", "seed": 3}


@dataclass
class Agents:
    process: AgentProcess
    offers: AttemptServer
    supervising: asyncio.Task[None]
    notes: list[str] = field(default_factory=list)

    async def run(self, view: TaskView, deadline_s: float = 30.0, **access: Any) -> dict[str, Any]:
        """Run an episode; raises the supervisor's error if the process is given up."""
        task = {"id": view.id, "messages": list(view.messages)}
        running = asyncio.ensure_future(
            self.offers.run({"task": task, **SESSION, "deadline_s": deadline_s, **access})
        )
        try:
            await asyncio.wait({running, self.supervising}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else self.supervising.result()  # type: ignore[return-value]
        finally:
            running.cancel()


@contextlib.asynccontextmanager
async def started(use: str, tmp_path: Path, **options: Any) -> AsyncIterator[Agents]:
    """Start the process; raises as `AgentProcess.start`."""
    offers = AttemptServer()
    async with offers.serve() as access:
        process = AgentProcess(AgentSettings(use=use, options=options), access, tmp_path, "agent")
        try:
            await process.start()
            notes: list[str] = []
            supervising = asyncio.create_task(supervise_agents(process, offers, notes.append))
            try:
                yield Agents(process, offers, supervising, notes)
            finally:
                supervising.cancel()
                await asyncio.gather(supervising, return_exceptions=True)
        finally:
            await process.stop()
