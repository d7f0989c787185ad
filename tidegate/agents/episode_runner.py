"""Runs the episodes of one worker process on its event loop: deadlines, cancellation, results."""

from __future__ import annotations

import asyncio
import io
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.errors import InfrastructureError
from tidegate.tracebacks import describe_error
from tidegate.types import MAX_ERROR, MAX_METRICS, MAX_OUTPUT, TaskView

MAX_LOG = 64_000_000
"""Characters that the agents of one process may print; further output is dropped."""
MAX_CAUSES = 20
"""Errors of a chain that are looked at."""
GRACE_S = 1.0
"""Time for a cancelled episode to clean up."""


@dataclass(slots=True)
class EpisodeJob:
    id: str
    task: asyncio.Task[Result]
    deadline: float
    cancelled: bool = False


@dataclass(slots=True)
class EpisodeRunner:
    """Runs episodes concurrently; each ends with exactly one `done` event."""

    agent: Agent
    emit: Callable[[dict[str, Any]], None]
    jobs: dict[str, EpisodeJob] = field(default_factory=dict)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)

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
        raise ValueError(
            f"the agent returned {len(result.metrics)} metrics, or one with a long name; the limit is "
            f"{MAX_METRICS} metrics, with names of {MAX_METRICS} characters"
        )
    reward = result.reward
    if isinstance(reward, Mapping):
        reward = {str(name): float(value) for name, value in reward.items()}
    elif reward is not None:
        reward = float(reward)
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
        over = _is_refused_after_end(error)
        told = traceback.format_exception_only(error) if over else traceback.format_exception(error)
        print(f"{job.id}: {''.join(told)}", file=sys.stderr, flush=True)
        outcome = "infra_error" if isinstance(error, InfrastructureError) else "agent_error"
        return {**fields, "outcome": outcome, "error": describe_error(error, MAX_ERROR)}
    result = job.task.result()
    return {**fields, "output": result.output, "reward": result.reward, "metrics": dict(result.metrics)}


def _is_refused_after_end(error: BaseException) -> bool:
    """Whether an agent failed because its session had ended, for example with the run: no fault to trace."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            break
        if "this session is over" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


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
