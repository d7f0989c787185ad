"""Owns the processes in which agents run, and sends them runs.

Agents run in a separate process, so that their CPU use, output, crashes and hangs do not affect the trainer.
When the process exits, its runs end as `cancelled` and the next run starts a new process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from tidegate.errors import ConfigError, StartError
from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY
from tidegate.service.process import OwnedProcess, run_together
from tidegate.types import Outcome, TaskView

SECRET_VARIABLES = (ADMIN_KEY, WORKER_KEY)
MAX_LINE = 64 * 1024 * 1024
START_S = 60.0
GRACE_S = 5.0
"""How long after a run's deadline the process may still report it, before it is killed."""
CLOSE_S = 5.0
MAX_RESTARTS = 5
"""Limit on restarts in a row without a completed run in between."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Result of one agent run. `outcome` is None if the agent returned; the gateway then decides on it."""

    outcome: Outcome | None = None
    output: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class Access(TypedDict):
    """Access to an agent's session, and its deadline in seconds."""

    base_url: str
    api_key: str
    model: str
    seed: int | None
    deadline_s: float


class AgentRunner(Protocol):
    """Runs agents: an `AgentWorker`, its remote counterpart, or an `AgentPool`."""

    async def open(self) -> None:
        """Wait until the agent is loaded. Raises ConfigError, StartError."""

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult: ...

    async def close(self) -> None: ...


class AgentWorker:
    """Owns the agents' process. Created by `start`, stopped by `close`."""

    def __init__(self, use: str, options: Mapping[str, Any], log_path: Path) -> None:
        self.use = use
        self.restarts = 0
        """Total number of restarts."""
        self._options = dict(options)
        self._log_path = log_path
        self._process: _Process | None = None
        self._failures = 0
        self._starting = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(cls, use: str, options: Mapping[str, Any], log_path: Path) -> AgentWorker:
        """Start the process and wait until it has loaded the agent. Raises ConfigError, StartError."""
        worker = cls(use, options, log_path)
        await worker.open()
        return worker

    async def open(self) -> None:
        await self._running_process()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.alive else None

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult:
        """Run the agent once, at most GRACE_S beyond its deadline. Cancelling this call cancels the run.

        Raises StartError if the process has exited too often.
        """
        deadline_s = access["deadline_s"]
        process = await self._running_process()
        ended = process.send_run(
            job_id, {"task": {"id": view.id, "messages": list(view.messages)}, "session": access}
        )
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                result = await ended
        except TimeoutError:
            # The worker enforces deadlines itself, unless an agent blocks its event loop.
            process.kill()
            return AgentResult(
                Outcome.TIMEOUT,
                error=f"the agent blocked its process beyond the deadline of {deadline_s:g} s",
            )
        except asyncio.CancelledError:
            process.send_cancel(job_id)
            raise
        finally:
            process.forget(job_id)
        if result.outcome is None:
            self._failures = 0
        return result

    async def close(self) -> None:
        """Stop the runs and the process; may be called twice."""
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _running_process(self) -> _Process:
        async with self._starting:
            if self._closed:
                raise StartError("the agents' process was closed")
            if self._process is not None and self._process.alive:
                return self._process
            if self._process is not None:
                await self._process.close()
                self._failures += 1
                if self._failures > MAX_RESTARTS:
                    raise StartError(
                        f"the agents' process exited {self._failures} times in a row; the end of "
                        f"{self._log_path}:\n{self._process.log_end()}"
                    )
                self.restarts += 1
            process = _Process(self.use, self._log_path)
            await process.start(self._options)
            self._process = process
            return process


class AgentPool:
    """Assigns each run to the member with the fewest runs."""

    def __init__(self, members: Sequence[AgentRunner]) -> None:
        self.members = list(members)
        self._runs = [0] * len(self.members)

    async def open(self) -> None:
        await run_together(member.open() for member in self.members)

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult:
        index = self._runs.index(min(self._runs))
        self._runs[index] += 1
        try:
            return await self.members[index].run(job_id, view, **access)
        finally:
            self._runs[index] -= 1

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))


class _Process(OwnedProcess):
    def __init__(self, use: str, log: Path) -> None:
        super().__init__("the agents' process", log)
        self.alive = True
        self._use = use
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}

    async def start(self, options: Mapping[str, Any]) -> None:
        pipe = asyncio.subprocess.PIPE
        child = await self._spawn(
            [sys.executable, "-m", "tidegate.agents.worker", "--use", self._use],
            stdin=pipe,
            stdout=pipe,
            limit=MAX_LINE,
            env={name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
        )
        assert child.stdin is not None
        assert child.stdout is not None
        self._commands, self._events = child.stdin, child.stdout
        self._send(dict(options))  # command lines are public
        try:
            await self._wait_until_ready()
        except BaseException:
            self.kill()
            await child.wait()
            raise
        self._reader = asyncio.create_task(self._read(), name="agents' events")

    def send_run(self, job_id: str, command: Mapping[str, Any]) -> asyncio.Future[AgentResult]:
        ended: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = ended
        self._send({"op": "run", "job": job_id, **command})
        return ended

    def send_cancel(self, job_id: str) -> None:
        if self.alive:
            self._send({"op": "cancel", "job": job_id})

    def forget(self, job_id: str) -> None:
        self._waiting.pop(job_id, None)

    def kill(self) -> None:
        self.alive = False
        self.signal(signal.SIGKILL)

    async def close(self) -> None:
        self._commands.close()
        await self._join(CLOSE_S)
        await self._reader

    def log_end(self, size: int = 2000) -> str:
        assert self.log is not None
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - size))
            return file.read().decode("utf-8", "replace").strip()

    def _send(self, command: Mapping[str, Any]) -> None:
        # Writes to an exited child are lost; `_read` ends its runs.
        self._commands.write(json.dumps(command).encode() + b"\n")

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                line = await self._events.readline()
        except TimeoutError:
            raise StartError(f"loading the agent {self._use!r} took longer than {START_S:g} s") from None
        if not line:
            raise StartError(f"the agents' process exited at start:\n{self.log_end()}")
        event = json.loads(line)
        if event["event"] != "ready":
            raise ConfigError(event["error"])

    async def _read(self) -> None:
        """Resolve runs from the process's events until it exits."""
        try:
            while line := await self._events.readline():
                event = json.loads(line)
                ended = self._waiting.get(event["job"])
                if ended is not None and not ended.done():
                    ended.set_result(_parse_result(event))
        finally:
            self.kill()
            for ended in self._waiting.values():
                if not ended.done():
                    ended.set_result(AgentResult(Outcome.CANCELLED, error="the agents' process exited"))


def _parse_result(event: Mapping[str, Any]) -> AgentResult:
    outcome = None if event["outcome"] is None else Outcome(event["outcome"])
    return AgentResult(outcome, event["output"], event["reward"], event["metrics"], event["error"])
