"""`tidegate train`, from settings to the last line: view, signals, run, report."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.agents.base import load_agent
from tidegate.config import Settings
from tidegate.envs.base import load_environment
from tidegate.errors import StartError, TidegateError
from tidegate.observer import Observer
from tidegate.trainer.observers.loggers import check_loggers, loggers_of
from tidegate.trainer.observers.several import Several
from tidegate.viewer.live import make_view
from tidegate.viewer.report import write_report

if TYPE_CHECKING:
    from tidegate.trainer.run import Result, Run


def launch(settings: Settings, *, resume: bool = False, fresh: bool = False) -> int:
    """Train and show it; returns the exit code. Everything that can be checked before a start is."""
    check(settings)
    environment = load_environment(settings.env.use, settings.env.options)
    from tidegate.trainer.run import Result, Run  # torch takes seconds; what is wrong has been said by now

    if fresh:
        set_aside(settings.run_dir)
    view = make_view(settings.run.live, settings.trainer.steps, settings.trainer.staleness_bound)
    observer = Several([view, *loggers_of(settings, view.note)])
    run = Run(settings, environment, observer, resume=resume)
    observer.started(_info(settings, run))
    try:
        try:
            result = asyncio.run(_with_signals(run))
            code = 0 if result.status == "completed" else 130
        except TidegateError as error:
            result = Result("failed", str(error), run.steps_done, run.before, run.after)
            code = error.exit_code
        _finish(settings, observer, result)
        return code
    finally:
        observer.close()


def check(settings: Settings) -> None:
    """What would fail later fails now, with a sentence. Raises StartError or ConfigError."""
    model = settings.model.path
    if not model.is_dir():
        raise StartError(f"model.path = {model}: there is no such directory")
    for needed in ("config.json", "tokenizer_config.json"):
        if not (model / needed).is_file():
            raise StartError(f"model.path = {model}: {needed} is missing; a Hugging Face directory is needed")
    load_agent(settings.agent.use, settings.agent.options)
    check_loggers(settings)


def set_aside(run_dir: Path) -> Path | None:
    """Move an existing run to the first free `<name>.N`."""
    if not run_dir.exists():
        return None
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    return run_dir.rename(aside)


async def _with_signals(run: Run) -> Result:
    """The first Ctrl-C (or SIGTERM) finishes the step in hand and commits; a second one stops at once."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if run.stop.is_set():
            run.observer.close()  # gives the terminal back
            os._exit(130)  # the owned processes end when their stdin closes
        run.observer.note("finishing the step and writing a checkpoint; once more stops at once")
        run.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await run.train()


def _info(settings: Settings, run: Run) -> dict[str, object]:
    return {
        "name": settings.run.name,
        "dir": str(settings.run_dir),
        "model": str(settings.model.path),
        "env": settings.env.use,
        "agent": settings.agent.use,
        "steps": settings.trainer.steps,
        "resumed_from": run.start.step if run.start.checkpoint is not None else None,
    }


def _finish(settings: Settings, observer: Observer, result: Result) -> None:
    """The report and the last words; a report that cannot be written does not undo the run."""
    run_dir = settings.run_dir
    try:
        report: str | None = str(write_report(run_dir))
    except (OSError, TidegateError) as error:
        observer.note(f"report.html could not be written: {error}")
        report = None
    begun = (run_dir / "ledger.jsonl").exists()
    newest = sorted((run_dir / "checkpoints").glob("step_*/COMMITTED"), key=lambda path: path.stat().st_mtime)
    observer.finished(
        {
            "status": result.status,
            "why": result.why,
            "before": result.before or None,
            "after": result.after or None,
            "checkpoint": str(newest[-1].parent) if newest else None,
            "report": report,
            # A run that failed before it began has no book: there is nothing to resume, it is started again.
            "resume": f"tidegate train {run_dir}/config.toml{' --resume' if begun else ''}",
        }
    )
