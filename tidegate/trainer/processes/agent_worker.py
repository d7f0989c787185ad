"""The parent's side of the agents' process: start it, hand it runs, outlive it.

Agents run in a process of their own, so that their CPU, their prints, their crashes and their hangs are
not the trainer's. When the process dies, the runs in it end `cancelled` and the next one gets a new
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tidegate.errors import ConfigError, StartError
from tidegate.gateway.client import ADMIN_KEY
from tidegate.service.service import signal_child
from tidegate.types import Outcome, TaskView

MAX_LINE = 64 * 1024 * 1024
START_S = 60.0
GRACE_S = 5.0
"""A worker that says nothing of a run so long after its deadline is stuck."""
CLOSE_S = 5.0
MAX_RESTARTS = 5
"""Deaths in a row, with no run ended well in between, after which the process is given up."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """How one run of the agent ended. `outcome` None: by itself; the gateway then says what it was."""

    outcome: Outcome | None = None
    output: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class Access(TypedDict):
    """An agent's way to its session, and how long it may take."""

    base_url: str
    api_key: str
    model: str
    seed: int | None
    deadline_s: float


class AgentWorker:
    """Owns the agents' process. Made by `start`, ended by `close`."""

    def __init__(self, use: str, options: Mapping[str, Any], log_path: Path) -> None:
        self.use = use
        self.restarts = 0
        """How often the process was started again, in all."""
        self._options = dict(options)
        self._log_path = log_path
        self._process: _Process | None = None
        self._deaths = 0
        self._starting = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(cls, use: str, options: Mapping[str, Any], log_path: Path) -> AgentWorker:
        """Start the process and wait until it has loaded the agent.

        Raises ConfigError where there is no such agent, and StartError where the process cannot run.
        """
        worker = cls(use, options, log_path)
        await worker.open()
        return worker

    async def open(self) -> None:
        """As `start`, of a worker that is there; may be called twice."""
        await self._live()

    @property
    def pid(self) -> int | None:
        """The process that runs the agents now; None between two."""
        return self._process.pid if self._process is not None and self._process.alive else None

    async def run(self, job_id: str, view: TaskView, **access: Unpack[Access]) -> AgentResult:
        """Run the agent once; `job_id` is never used twice. Returns soon after `deadline_s` at the latest.

        Cancelling this call cancels the run. Raises StartError once the process has died too often.
        """
        deadline_s = access["deadline_s"]
        process = await self._live()
        ended = process.send_run(
            job_id, {"task": {"id": view.id, "messages": list(view.messages)}, "session": access}
        )
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                result = await ended
        except TimeoutError:
            # The worker ends every run by its deadline: if it didn't, an agent blocks its event loop.
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
            self._deaths = 0
        return result

    async def close(self) -> None:
        """End the runs and the process; may be called twice."""
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _live(self) -> _Process:
        """The running process, started again where it died. Raises StartError."""
        async with self._starting:
            if self._closed:
                raise StartError("the agents' process was closed")
            if self._process is not None and self._process.alive:
                return self._process
            if self._process is not None:
                await self._process.close()
                self._deaths += 1
                if self._deaths > MAX_RESTARTS:
                    raise StartError(
                        f"the agents' process died {self._deaths} times in a row; the end of "
                        f"{self._log_path}:\n{tail(self._log_path)}"
                    )
                self.restarts += 1
            self._process = await _Process.start(self.use, self._options, self._log_path)
            return self._process


class _Process:
    """One child process and the runs that wait for it."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self.pid = child.pid
        self.alive = True
        self._child = child
        self._orders = child.stdin
        self._events = child.stdout
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, use: str, options: Mapping[str, Any], log_path: Path) -> _Process:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tidegate.agents.worker",
                "--use", use,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                limit=MAX_LINE,
                env={name: value for name, value in os.environ.items() if name != ADMIN_KEY},
                # Ctrl-C in a terminal reaches the trainer alone, which then ends its agents in order.
                start_new_session=True,
            )  # fmt: skip
        process = cls(child)
        process._send(dict(options))  # not as an argument, which everyone can read
        try:
            await process._greeting(use, log_path)
        except BaseException:
            process.kill()
            await child.wait()
            raise
        process._reader = asyncio.create_task(process._read(), name="agents' events")
        return process

    def send_run(self, job_id: str, order: Mapping[str, Any]) -> asyncio.Future[AgentResult]:
        ended: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = ended
        self._send({"op": "run", "job": job_id, **order})
        return ended

    def send_cancel(self, job_id: str) -> None:
        if self.alive:
            self._send({"op": "cancel", "job": job_id})

    def forget(self, job_id: str) -> None:
        self._waiting.pop(job_id, None)

    def kill(self) -> None:
        self.alive = False
        signal_child(self._child, signal.SIGKILL)

    async def close(self) -> None:
        self._orders.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._child.wait()
        except TimeoutError:
            self.kill()
            await self._child.wait()
        if self._reader is not None:
            await self._reader

    def _send(self, order: Mapping[str, Any]) -> None:
        # A dead child's pipe takes what is written and loses it; its reader ends the runs.
        self._orders.write(json.dumps(order).encode() + b"\n")

    async def _greeting(self, use: str, log_path: Path) -> None:
        try:
            async with asyncio.timeout(START_S):
                line = await self._events.readline()
        except TimeoutError:
            raise StartError(f"loading the agent {use!r} took longer than {START_S:g} s") from None
        if not line:
            raise StartError(f"the agents' process ended at once:\n{tail(log_path)}")
        greeting = json.loads(line)
        if greeting["event"] != "ready":
            raise ConfigError(greeting["error"])

    async def _read(self) -> None:
        """Hand each event to the run that waits for it, until the process has ended."""
        try:
            while line := await self._events.readline():
                event = json.loads(line)
                ended = self._waiting.get(event["job"])
                if ended is not None and not ended.done():
                    ended.set_result(_result(event))
        finally:
            self.kill()
            for ended in self._waiting.values():
                if not ended.done():
                    ended.set_result(AgentResult(Outcome.CANCELLED, error="the agent process died"))


def _result(event: Mapping[str, Any]) -> AgentResult:
    outcome = None if event["outcome"] is None else Outcome(event["outcome"])
    return AgentResult(outcome, event["output"], event["reward"], event["metrics"], event["error"])


def tail(log: Path, characters: int = 2000) -> str:
    """The end of a log file, for an error's message."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - characters))
        return file.read().decode("utf-8", "replace").strip()
