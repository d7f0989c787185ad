"""Main of an agent process: `python -m tidegate.agents.worker --use REF`.

Reads JSON lines from stdin (the first one: the agent's options) and writes JSON lines to stdout:

    <- {"op": "run", "job": ID, "task": {"id", "messages"},
        "session": {"base_url", "api_key", "model", "seed", "deadline_s"}}
    <- {"op": "cancel", "job": ID}
    -> {"event": "ready"}, or {"event": "failed", "error": TEXT} if the agent cannot be loaded
    -> {"event": "done", "job": ID, "outcome": null | "agent_error" | "infra_error" | "timeout" |
        "cancelled", "output": TEXT | null, "reward": NUMBER | null, "metrics": {}, "error": TEXT | null}

The agents' own output goes to stderr, so it cannot mix with the events. At the end of stdin all episodes are
cancelled and the process exits.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.agents.base import Agent, Result, Session, load_agent
from tidegate.errors import ConfigError, InfrastructureError
from tidegate.service.address import reachable_address
from tidegate.service.parent_death import continue_at_parent_exit
from tidegate.service.process_secrets import shield_process
from tidegate.tracebacks import describe_error
from tidegate.types import TaskView

MAX_OUTPUT = 1_000_000
"""Limit of an output, in characters."""
MAX_METRICS = 100
"""Limit of an episode's metrics, and of the characters of their names."""
MAX_LOG = 64_000_000
"""Characters that the agents of one process may print; further output is dropped."""
MAX_ERROR = 2_000
"""Characters of an error that are recorded with the episode; the log has the full text."""
GRACE_S = 1.0
"""Time for a cancelled episode to clean up."""
EXIT_S = 3.0


@dataclass(slots=True)
class EpisodeJob:
    id: str
    task: asyncio.Task[Result]
    deadline: float
    cancelled: bool = False


@dataclass(slots=True)
class Worker:
    """Runs episodes concurrently; each ends with exactly one `done` event."""

    agent: Agent
    emit: Callable[[dict[str, Any]], None]
    jobs: dict[str, EpisodeJob] = field(default_factory=dict)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)

    def handle(self, line: bytes) -> None:
        command = json.loads(line)
        if command["op"] == "run":
            self.start(command["job"], command["task"], command["session"])
        elif command["op"] == "cancel":
            self.cancel(command["job"])

    def cancel(self, job_id: str) -> None:
        """Cancels an episode, if it runs."""
        if job := self.jobs.get(job_id):
            job.cancelled = True
            job.task.cancel()

    async def stop(self) -> None:
        """Cancels all episodes and waits up to GRACE_S for their clean-up."""
        for job_id in self.jobs:
            self.cancel(job_id)
        if self._watches:
            await asyncio.wait(self._watches, timeout=GRACE_S)

    def start(self, job_id: str, task: dict[str, Any], access: dict[str, Any]) -> None:
        """Starts an episode of `task` (`id`, `messages`) with the access to its session."""
        deadline = time.monotonic() + access["deadline_s"]
        session = Session(access["base_url"], access["api_key"], access["model"], access["seed"], deadline)
        view = TaskView(task["id"], task["messages"])
        running = asyncio.create_task(self._run_agent(view, session), name=job_id)
        job = self.jobs[job_id] = EpisodeJob(job_id, running, deadline)
        watch = asyncio.create_task(self._watch(job))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _run_agent(self, view: TaskView, session: Session) -> Result:
        try:
            return checked(await self.agent.run(view, session))
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            # Each of these would otherwise end the process with all its episodes.
            raise RuntimeError(f"the agent raised {type(error).__name__}({error})") from error

    async def _watch(self, job: EpisodeJob) -> None:
        """Waits for the episode until its deadline and emits its `done` event."""
        await asyncio.wait({job.task}, timeout=max(0.0, job.deadline - time.monotonic()))
        late = not job.task.done()
        if late:
            job.task.cancel()
            await asyncio.wait({job.task}, timeout=GRACE_S)
        del self.jobs[job.id]
        self.emit({"event": "done", "job": job.id, **_outcome(job, late=late)})


def checked(result: str | Result | None) -> Result:
    """Returns an agent's result as a `Result`; raises TypeError or ValueError if it is invalid."""
    if not isinstance(result, Result):
        result = Result(result)
    output = result.output
    if output is not None:
        if not isinstance(output, str):
            raise TypeError(f"the agent returned {type(output).__name__}, not str, Result or None")
        if len(output) > MAX_OUTPUT:
            raise ValueError(
                f"the agent's output has {len(output):,} characters; the limit is {MAX_OUTPUT:,}"
            )
        # A str may contain lone surrogates, which cannot be encoded.
        output = output.encode("utf-8", "replace").decode("utf-8")
    if len(result.metrics) > MAX_METRICS or any(len(str(name)) > MAX_METRICS for name in result.metrics):
        raise ValueError(f"the agent has more than {MAX_METRICS} metrics, or a name of more characters")
    reward = None if result.reward is None else float(result.reward)
    return Result(output, reward, {str(name): float(value) for name, value in result.metrics.items()})


def _outcome(job: EpisodeJob, *, late: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"outcome": None, "output": None, "reward": None, "metrics": {}, "error": None}
    # The result of an episode that was cancelled or late is discarded.
    error = job.task.exception() if job.task.done() and not job.task.cancelled() else None
    if job.cancelled:
        return {**fields, "outcome": "cancelled", "error": "the episode was cancelled"}
    if late:
        return {**fields, "outcome": "timeout", "error": "the agent did not return before its deadline"}
    if job.task.cancelled():
        return {**fields, "outcome": "agent_error", "error": "the agent cancelled itself"}
    if error is not None:
        print(f"{job.id}: {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
        outcome = "infra_error" if isinstance(error, InfrastructureError) else "agent_error"
        return {**fields, "outcome": outcome, "error": describe_error(error, MAX_ERROR)}
    result = job.task.result()
    return {**fields, "output": result.output, "reward": result.reward, "metrics": dict(result.metrics)}


class CappedLog(io.TextIOBase):
    """A text stream that forwards a limited number of characters and then one line that the rest is
    dropped."""

    def __init__(self, target: Any, limit: int = MAX_LOG) -> None:
        self._target = target
        self._left = limit

    def write(self, text: str) -> int:
        if self._left > 0:
            self._target.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._target.write("\n[the agents printed too much: the rest is dropped]\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def fileno(self) -> int:
        return int(self._target.fileno())


async def _serve(use: str, options: dict[str, Any], stdout: int) -> int:
    loop = asyncio.get_running_loop()
    # asyncio's transport does not block, and outlives this function's last write.
    events, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(stdout, "wb", buffering=0))

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event).encode() + b"\n")

    try:
        worker = Worker(load_agent(use, options), emit)
    except ConfigError as error:
        emit({"event": "failed", "error": str(error)})
        events.close()
        return error.exit_code
    eof = asyncio.Event()
    threading.Thread(target=_read_commands, args=(loop, worker, eof), daemon=True, name="commands").start()
    emit({"event": "ready"})
    await eof.wait()
    await worker.stop()
    return 0


def _read_commands(loop: asyncio.AbstractEventLoop, worker: Worker, eof: asyncio.Event) -> None:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(worker.handle, line)
    loop.call_soon_threadsafe(eof.set)
    time.sleep(EXIT_S)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent process; started by the trainer.")
    parser.add_argument("--use", required=True, help="a built-in agent, file.py:Name or module:Name")
    arguments = parser.parse_args()
    continue_at_parent_exit()
    shield_process()
    options = json.loads(sys.stdin.buffer.readline() or b"{}")
    stdout = os.dup(1)
    os.dup2(2, 1)  # for the agents' child processes, too
    sys.stdout = sys.stderr = CappedLog(sys.stderr)
    local = f"127.0.0.1,localhost,::1,{reachable_address()}"
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach a gateway on this machine
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), local]))
    code = asyncio.run(_serve(arguments.use, options, stdout))
    # Threads of agents that never return must not keep the process alive.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
