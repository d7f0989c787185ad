"""The agents' process: `python -m tidegate.agents.worker --use REF --options JSON`.

It is told what to run in JSON lines on stdin and answers in JSON lines on stdout:

    <- {"op": "run", "job": ID, "task": {"id", "messages"},
        "session": {"base_url", "api_key", "model", "seed", "deadline_s"}}
    <- {"op": "cancel", "job": ID}
    -> {"event": "ready"}, or {"event": "failed", "error": TEXT} where the agent cannot be loaded
    -> {"event": "done", "job": ID, "outcome": null | "agent_error" | "infra_error" | "timeout" |
        "cancelled", "output": TEXT | null, "reward": NUMBER | null, "metrics": {}, "error": TEXT | null}

Whatever the agents print goes to stderr, so it cannot get between the events. The end of stdin ends
every run and the process.
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
from tidegate.service.address import own_address
from tidegate.service.parent_death import continue_at_parent_exit
from tidegate.service.secrecy import shield_process
from tidegate.tracebacks import describe_error
from tidegate.types import TaskView

MAX_OUTPUT = 1_000_000
"""Characters of an output; an agent that returns more has gone wrong."""
MAX_METRICS = 100
MAX_LOG = 64_000_000
"""Characters that the agents of one process may print; more is dropped."""
MAX_ERROR = 2_000
"""Characters of an error that go with the episode; the log has all of it."""
GRACE_S = 1.0
"""What a run that is being cancelled gets to clean up."""
EXIT_S = 3.0


@dataclass(slots=True)
class EpisodeJob:
    """One run of the agent."""

    id: str
    task: asyncio.Task[Result]
    deadline: float
    cancelled: bool = False


@dataclass(slots=True)
class Worker:
    """Runs the agent many times at once; every run ends in exactly one `done` event."""

    agent: Agent
    emit: Callable[[dict[str, Any]], None]
    jobs: dict[str, EpisodeJob] = field(default_factory=dict)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)

    def handle(self, line: bytes) -> None:
        order = json.loads(line)
        if order["op"] == "run":
            self._start(order)
        elif order["op"] == "cancel" and (job := self.jobs.get(order["job"])):
            job.cancelled = True
            job.task.cancel()

    async def stop(self) -> None:
        """Cancel every run and give it a moment to clean up."""
        for job in self.jobs.values():
            job.cancelled = True
            job.task.cancel()
        if self._watches:
            await asyncio.wait(self._watches, timeout=GRACE_S)

    def _start(self, order: dict[str, Any]) -> None:
        access = order["session"]
        deadline = time.monotonic() + access["deadline_s"]
        session = Session(access["base_url"], access["api_key"], access["model"], access["seed"], deadline)
        view = TaskView(order["task"]["id"], order["task"]["messages"])
        task = asyncio.create_task(self._run_agent(view, session), name=order["job"])
        job = self.jobs[order["job"]] = EpisodeJob(order["job"], task, deadline)
        watch = asyncio.create_task(self._watch(job))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _run_agent(self, view: TaskView, session: Session) -> Result:
        try:
            return checked(await self.agent.run(view, session))
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            # Left alone, any of these would end the process and every other run with it.
            raise RuntimeError(f"the agent raised {type(error).__name__}({error})") from error

    async def _watch(self, job: EpisodeJob) -> None:
        """Wait for the run, not beyond its deadline, and say how it ended."""
        await asyncio.wait({job.task}, timeout=max(0.0, job.deadline - time.monotonic()))
        late = not job.task.done()
        if late:
            job.task.cancel()
            await asyncio.wait({job.task}, timeout=GRACE_S)
        del self.jobs[job.id]
        self.emit({"event": "done", "job": job.id, **_ending(job, late=late)})


def checked(result: str | Result | None) -> Result:
    """The result of a run in its full form; raises TypeError or ValueError where it is none."""
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
        # Half a surrogate pair is a str, but no text that could be sent on.
        output = output.encode("utf-8", "replace").decode("utf-8")
    if len(result.metrics) > MAX_METRICS or any(len(str(name)) > MAX_METRICS for name in result.metrics):
        raise ValueError(f"the agent's metrics are more than {MAX_METRICS}, or their names longer than that")
    reward = None if result.reward is None else float(result.reward)
    return Result(output, reward, {str(name): float(value) for name, value in result.metrics.items()})


def _ending(job: EpisodeJob, *, late: bool) -> dict[str, Any]:
    ended: dict[str, Any] = {"outcome": None, "output": None, "reward": None, "metrics": {}, "error": None}
    # Whatever a run still came to after it was cancelled or too late is not wanted any more.
    error = job.task.exception() if job.task.done() and not job.task.cancelled() else None
    if job.cancelled:
        return {**ended, "outcome": "cancelled", "error": "the run was cancelled"}
    if late:
        return {**ended, "outcome": "timeout", "error": "the agent did not end by its deadline"}
    if job.task.cancelled():
        return {**ended, "outcome": "agent_error", "error": "the agent cancelled itself"}
    if error is not None:
        print(f"{job.id}: {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
        outcome = "infra_error" if isinstance(error, InfrastructureError) else "agent_error"
        return {**ended, "outcome": outcome, "error": describe_error(error, MAX_ERROR)}
    result = job.task.result()
    return {**ended, "output": result.output, "reward": result.reward, "metrics": dict(result.metrics)}


class CappedLog(io.TextIOBase):
    """A text stream that passes on so many characters and then drops the rest, saying so once."""

    def __init__(self, to: Any, limit: int = MAX_LOG) -> None:
        self._to = to
        self._left = limit

    def write(self, text: str) -> int:
        if self._left > 0:
            self._to.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._to.write("\n[the agents printed too much: the rest is dropped]\n")
        return len(text)

    def flush(self) -> None:
        self._to.flush()

    def fileno(self) -> int:
        return int(self._to.fileno())


async def _serve(use: str, options: dict[str, Any], stdout: int) -> int:
    loop = asyncio.get_running_loop()
    # The stream must outlive this function's last write; asyncio's own transport never blocks.
    events, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(stdout, "wb", buffering=0))

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event).encode() + b"\n")

    try:
        worker = Worker(load_agent(use, options), emit)
    except ConfigError as error:
        emit({"event": "failed", "error": str(error)})
        events.close()
        return error.exit_code
    ended = asyncio.Event()
    threading.Thread(target=_read_orders, args=(loop, worker, ended), daemon=True, name="orders").start()
    emit({"event": "ready"})
    await ended.wait()
    await worker.stop()
    return 0


def _read_orders(loop: asyncio.AbstractEventLoop, worker: Worker, ended: asyncio.Event) -> None:
    """Runs in a thread, so that the end of stdin is seen even where an agent blocks the event loop."""
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(worker.handle, line)
    loop.call_soon_threadsafe(ended.set)
    time.sleep(EXIT_S)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The agents' process; started by the trainer.")
    parser.add_argument("--use", required=True, help="a built-in agent, file.py:Name or module:Name")
    arguments = parser.parse_args()
    continue_at_parent_exit()
    shield_process()
    options = json.loads(sys.stdin.buffer.readline() or b"{}")
    stdout = os.dup(1)
    os.dup2(2, 1)  # also for whatever an agent starts
    sys.stdout = sys.stderr = CappedLog(sys.stderr)
    here = f"127.0.0.1,localhost,::1,{own_address()}"
    for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's own gateway
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), here]))
    code = asyncio.run(_serve(arguments.use, options, stdout))
    # Threads of agents that never returned must not keep the process.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
