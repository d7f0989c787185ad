"""Runs `tidegate train`: checks, view, signals, run, report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tidegate.agents.base import load_agent
from tidegate.agents.command import CommandAgent
from tidegate.config import Settings
from tidegate.doctor.model import refuse_incomplete, refuse_unusable
from tidegate.envs.base import Environment, check_reward_timeout, load_environment
from tidegate.envs.shell.sandboxed import SandboxedEnvironment
from tidegate.errors import STOPPED, SandboxError, StartError, TidegateError
from tidegate.observer import CompositeObserver, Observer
from tidegate.plan.memory import check_memory
from tidegate.program import advise_extra
from tidegate.sandbox import Sandbox
from tidegate.service.directory_lock import DirectoryLock
from tidegate.trainer.loggers.registry import check_loggers, make_loggers
from tidegate.trainer.preflight import (
    check_architecture,
    check_engines,
    check_nccl,
    check_port,
    check_rewarded_policies,
    check_teachers,
    check_writable,
    set_nccl_memory,
)
from tidegate.trainer.processes.gpus import check_visible, engine_gpus, visible_gpus
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.rollout.evaluator import check_suites
from tidegate.trainer.start import Resume, Start
from tidegate.viewer.live import make_view
from tidegate.viewer.report import write_report
from tidegate.viewer.summary import continue_command

if TYPE_CHECKING:
    from tidegate.trainer.end import RunResult
    from tidegate.trainer.run import Run

SANDBOX_S = 30.0
"""Time limit of the start of a sandbox before the run."""


def launch(
    settings: Settings,
    *,
    resume: Resume = False,
    fresh: bool = False,
    cluster: str | None = None,
    lift_quarantine: bool = False,
) -> int:
    """Trains with a live view, after all checks that are possible before the start.

    Args:
        settings: Settings of the run.
        resume: Continue from the newest checkpoint; `auto`: if there is a run.
        fresh: Rename an existing run of this name first.
        cluster: Address of a Ray cluster, or `auto` or `local`; None: run on this machine.
        lift_quarantine: Issue quarantined tasks again.

    Returns:
        The exit code.
    """
    view = make_view(settings.run.live_view, settings.trainer.step_limit, settings.trainer.staleness_bound)
    make = partial(Launch, settings, resume, fresh, lift_quarantine=lift_quarantine)
    try:
        if cluster is not None:
            return _driver()(cluster, settings, make, view)
        set_nccl_memory()
        return asyncio.run(_with_signals(make(view, LocalProcesses())))
    finally:
        view.close()


def _driver() -> Callable[..., int]:
    """Imports the cluster driver; raises StartError if Ray is not installed."""
    try:
        from tidegate.trainer.cluster.driver import drive
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise StartError(f"--cluster needs Ray, on every node: {advise_extra('ray')}") from None
    return drive


class Launch:
    """One run with its checks, observers and report; constructed on the machine of the first trainer rank."""

    def __init__(
        self,
        settings: Settings,
        resume: Resume,
        fresh: bool,
        view: Observer,
        provider: ProcessProvider,
        *,
        lift_quarantine: bool = False,
    ) -> None:
        """Raises StartError or ConfigError, and NothingToDoError if the run is complete."""
        settings, environment = check_environment(settings)
        check_writable(settings.run_dir)
        with contextlib.ExitStack() as stack:
            wait = view.note if resume == "auto" else None
            lock = stack.enter_context(DirectoryLock(settings.run_dir, "tidegate train", wait=wait))
            start = None if fresh else Start.of(settings, resume)
            if start is not None:
                start.lift_quarantine = lift_quarantine
            check_rewarded_policies(settings, environment)
            check_surroundings(settings, environment, own_gateway=isinstance(provider, LocalProcesses))
            # After the checks, because importing torch and the trainer takes seconds.
            check_model(settings, engines=True if isinstance(provider, LocalProcesses) else None)
            from tidegate.trainer.run import Run

            if fresh:
                lock.set_aside()
            self._settings = settings
            self._view = view
            self._observer = CompositeObserver([view, *make_loggers(settings, view.note)])
            self._run = Run(
                settings, environment, self._observer, start=start, provider=provider, locked=True
            )
            if lock.unsupported:
                view.note(lock.unsupported)
            self._lock = stack.pop_all()

    async def run(self) -> int:
        """Trains, writes the report and returns the exit code."""
        run = self._run
        self._observer.started(_info(self._settings, run))
        try:
            try:
                result = await run.train()
                code = 0 if result.status == "completed" else STOPPED
            except TidegateError as error:
                result = replace(run.result, status="failed", why=str(error))
                code = error.exit_code
            _report(self._settings, self._observer, result)
            return code
        finally:
            self._observer.close()
            self._lock.close()

    def stop(self) -> None:
        """Finishes the current step and commits; a second call exits at once."""
        if self._run.stop.is_set():
            self._view.close()  # restores the terminal
            os._exit(STOPPED)  # owned processes exit when their stdin closes
        self._view.note("finishing the current step and writing a checkpoint; Ctrl-C again exits at once")
        self._run.stop.set()


def check_environment(settings: Settings) -> tuple[Settings, Environment]:
    """Checks what a run is to learn from.

    Returns:
        The settings with the judge's rubric read from its file, and the environment.

    Raises:
        ConfigError: The environment cannot be loaded, or judge, suites or teachers do not fit it.
    """
    check(settings)
    settings = _with_rubric(settings)
    environment = load_environment(settings.env.use, settings.env.options)
    check_reward_timeout(environment, settings.env.reward_timeout_s)
    if settings.eval.suites:
        check_suites(settings.eval, environment.eval_sets())
    check_teachers(settings.trainer.teacher, sorted(environment.rewarders()))
    return settings, environment


def check_surroundings(settings: Settings, environment: Environment, *, own_gateway: bool) -> None:
    """Raises StartError if the gateway's port, the engines or sandboxes cannot be used.

    Raises ConfigError if ranks and engines would share GPUs, or if weights cannot be sent to the engines.

    Args:
        settings: Settings of the run.
        environment: Its environment.
        own_gateway: Whether the run's gateway is to listen on this machine, and its episodes to run here.
    """
    if own_gateway:
        asyncio.run(_open_sandboxes(settings, environment))
    if own_gateway and settings.gateway.url is None:
        check_port(settings.gateway.host, settings.gateway.port)
    check_engines(settings.engine.urls)
    check_nccl(settings)
    if own_gateway:
        engine_gpus(settings, len(visible_gpus()))


async def _open_sandboxes(settings: Settings, environment: Environment) -> None:
    """Opens one sandbox of each kind that episodes need: its absence would look like an outage later.

    Raises StartError.
    """
    openings: dict[str, Callable[[], Awaitable[Sandbox]]] = {}
    for name, part in environment.rewarders().items() if not settings.env.urls else ():
        if isinstance(part, SandboxedEnvironment):
            openings[f"the environment {name}"] = part.open
    if settings.agent.source == "local" and settings.agent.options.get("sandbox"):
        agent = load_agent(settings.agent.use, settings.agent.options)
        if isinstance(agent, CommandAgent) and agent.sandbox is not None:
            openings["agent.options.sandbox"] = partial(agent.sandbox.open, SANDBOX_S)
    for what, opening in openings.items():
        try:
            async with asyncio.timeout(SANDBOX_S):
                await (await opening()).close()
        except SandboxError as error:
            raise StartError(
                f"{what}: no sandbox can be started: {error}; docs/sandbox.md has the requirements"
            ) from None
        except TimeoutError:  # a container's image is being fetched, say
            continue


def check_model(settings: Settings, *, engines: bool | None) -> None:
    """Raises StartError if the device, the tokenizer or the free memory does not suit the model.

    Args:
        settings: Settings of the run.
        engines: Whether engines are started on this machine, too; None: others share the work.
    """
    from tidegate.devices import count_gpus, find_device, free_memory

    find_device("trainer.device", settings.trainer.device)
    if engines:
        check_visible(settings, count_gpus())
    own = settings.trainer.backend == "own"
    for name in settings.policy_names:
        refuse_unusable(settings.of_policy(name).model.path, weights=own)
        if own and engines is not False and name in settings.trained_policies:
            check_architecture(settings.of_policy(name))
    if engines is not None and own:
        check_memory(settings, free_memory, engines=engines)


def _with_rubric(settings: Settings) -> Settings:
    """Returns the settings with the text of `env.judge.rubric_file`, which other machines may not have.

    Raises:
        ConfigError: The file cannot be read, or the key of the judge is not set.
    """
    env = settings.env.model_copy(update={"judge": settings.env.judge.resolved()})
    return settings.model_copy(update={"env": env})


def check(settings: Settings) -> None:
    """Checks model, agent and loggers before the start; raises StartError or ConfigError."""
    for name in settings.policy_names:
        path = settings.of_policy(name).model.path
        refuse_incomplete(path, weights=settings.trainer.backend == "own")
    if settings.agent.source == "local":
        load_agent(settings.agent.use, settings.agent.options)
    check_loggers(settings)


async def _with_signals(launched: Launch) -> int:
    """Runs it; Ctrl-C or SIGTERM stops it."""
    stop_on_signals(launched.stop)
    return await launched.run()


def stop_on_signals(stop: Callable[[], object]) -> None:
    """Calls `stop` on Ctrl-C or SIGTERM, from now on."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _info(settings: Settings, run: Run) -> dict[str, object]:
    return {
        "name": settings.run.name,
        "dir": str(settings.run_dir),
        "model": ", ".join(str(settings.of_policy(name).model.path) for name in settings.policy_names),
        "env": settings.env.use if settings.agent.source != "client" else "clients' own",
        "agent": _agent(settings),
        "steps": settings.trainer.step_limit,
        "resumed_from": run.start.step if run.start.checkpoint is not None else None,
    }


def _agent(settings: Settings) -> str:
    by_source = {"local": settings.agent.use, "remote": "remote workers", "client": "clients"}
    return by_source[settings.agent.source]


def _report(settings: Settings, observer: Observer, result: RunResult) -> None:
    """Writes the report and shows the summary; a failure to write the report is only noted."""
    run_dir = settings.run_dir
    try:
        report: str | None = str(write_report(run_dir))
    except (OSError, TidegateError) as error:
        observer.note(f"report.html could not be written: {error}")
        report = None
    newest = sorted((run_dir / "checkpoints").glob("step_*/COMMITTED"), key=lambda path: path.stat().st_mtime)
    observer.finished(
        {
            "status": result.status,
            "why": result.why,
            "before": result.initial_eval or None,
            "after": result.final_eval or None,
            "checkpoint": str(newest[-1].parent) if newest else None,
            "report": report,
            "resume": _resume_command(settings, result),
        }
    )


def _resume_command(settings: Settings, result: RunResult) -> str:
    """Returns the command that continues the run, or starts it again if it failed before it had a ledger.

    It is empty if the run reached `trainer.until`.
    """
    if result.status == "completed" and result.why:
        return ""
    return continue_command(settings.run_dir, 2 * result.step if result.status == "completed" else None)
