"""One training run: starts its processes, trains, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path

from tidegate import failpoints
from tidegate.config import Settings, load_settings, saved
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, LedgerError, TidegateError
from tidegate.observer import Observer
from tidegate.service.directory_lock import DirectoryLock
from tidegate.settings import sections
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.backends import load_policy
from tidegate.trainer.batch.credit import BaselineCredit, CreditAssignment
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.end import RunResult, record_failed_start, storage_error
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.audit_check import summary
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.policy.policies import load_policies
from tidegate.trainer.policy.protocol import TrainedPolicy
from tidegate.trainer.processes.launcher import Processes, start_processes
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.version_writer import VERSION
from tidegate.trainer.records.lift_requests import requested_lifts
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.resume import ResumedRun, take_over
from tidegate.trainer.start import Start, base_model
from tidegate.trainer.teacher.start import start_teacher
from tidegate.trainer.training import Training
from tidegate.trainer.waits import run_to_completion

MOST_NAMED = 5
"""Quarantined tasks that a message names."""


class Run:
    """A training run. `train()` is called once.

    Args:
        settings: Settings of the run.
        environment: Tasks and rewards.
        observer: Shows progress.
        start: Where to start; by default at the base model.
        credit: Computes advantages; by default according to the settings.
        provider: Provides the run's processes; by default on this machine.
        locked: The caller holds the lock of the run's directory.

    Attributes:
        stop: Set it to end the run after the current step.
        result: Result so far, also after an error.

    Raises:
        ConfigError: Before anything is written.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        observer: Observer,
        *,
        start: Start | None = None,
        credit: CreditAssignment | None = None,
        provider: ProcessProvider | None = None,
        locked: bool = False,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.observer = observer
        self.credit = credit or BaselineCredit(settings.trainer)
        self.provider = provider or LocalProcesses()
        self.dir = settings.run_dir.absolute()
        self._locked = locked
        self.start = start or Start.of(settings, resume=False)
        self.stop = asyncio.Event()
        self.result = RunResult("failed", None, self.start.step)
        self._supervisor = TaskSupervisor()
        self._training: Training | None = None

    async def train(self) -> RunResult:
        """Train to the last step, to `trainer.until`, to `stop`, or to an error, and write a checkpoint.

        Raises TidegateError after shutdown.
        """
        try:
            async with contextlib.AsyncExitStack() as stack:
                if not self._locked:
                    stack.enter_context(DirectoryLock(self.dir, "a run"))
                changed = self._prepare()
                try:
                    training = await self._assemble(stack, changed)
                    await training.run()
                finally:
                    # Before the stack stops the processes, which their watchers would start again.
                    await self._supervisor.close()
        except OSError as error:
            raise _translate_os_error(error, self.dir) from error
        return self.result

    def _prepare(self) -> str:
        """Create the run's directory; returns the settings that differ from those before a resume."""
        for name in ("logs", "weights", "checkpoints", "trajectories"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        # It has recorded texts, and may have keys.
        self.dir.chmod(0o700)
        config = self.dir / "config.toml"
        changed = self._differences(config)
        part = self.dir / ".config.toml.partial"
        part.write_text(saved(self.settings), encoding="utf-8")
        with failpoints.around("config"):
            # As a whole: a resume after a kill must find settings that it can read.
            part.replace(config)
        return changed

    def _differences(self, config: Path) -> str:
        """Return the settings that differ from those before the resume."""
        if not (self.start.past.epoch and config.exists()):
            return ""
        try:
            return ", ".join(sections.differences(load_settings(config), self.settings))
        except ConfigError as error:
            return f"unknown, as the earlier settings cannot be read: {error}"

    async def _assemble(self, stack: contextlib.AsyncExitStack, changed: str) -> Training:
        """Start the processes and load the policy at the same time, then continue the ledger."""
        settings, start = self.settings, self.start
        rank_processes = self.provider.rank_processes(settings, self.dir)
        ranks = RankProcesses(settings.trainer, rank_processes, self.provider.host)
        stack.push_async_callback(ranks.close)
        loading = asyncio.create_task(self._load_policy(ranks))
        stack.callback(loading.cancel)
        supervisor, note, provider = self._supervisor, self.observer.note, self.provider
        adapters = settings.trainer.lora.publish == "adapter" and not settings.policies  # `publish_start`
        if adapters and settings.engine.kind in ("sglang", "vllm"):
            # They serve the base model with an adapter from the start: no adapter fits merged weights.
            first = self.dir / "weights" / VERSION.format(start.version)
            save = partial((await loading).save_adapter, first, dtype=settings.engine.weights_dtype)
            start.weights = await asyncio.to_thread(save)
        teacher = await start_teacher(settings, self.dir, supervisor, note, stack, provider)
        processes = await start_processes(
            settings, self.dir, self._live_weights, supervisor, note, stack, provider
        )
        policy = await loading
        ledger = stack.enter_context(await asyncio.to_thread(Ledger, self.dir / "ledger.jsonl"))
        try:
            resumed = await self._continue(ledger, processes, changed)
            self._training = Training(
                settings=settings, start=start, environment=self.environment, observer=self.observer,
                credit=self.credit, provider=self.provider, processes=processes, policy=policy, ledger=ledger,
                resumed=resumed, supervisor=self._supervisor, stop=self.stop, result=self.result, stack=stack,
                teacher=teacher,
            )  # fmt: skip
        except BaseException as error:
            await run_to_completion(self._record_failure(ledger, error))
            raise
        return self._training

    async def _continue(self, ledger: Ledger, processes: Processes, changed: str) -> ResumedRun:
        """Continue the ledger with a new epoch, and report what a resume takes over."""
        start = self.start
        # Before the ledger records that those steps are lost: an audit may compare the two at any time.
        await asyncio.to_thread(_truncate_metrics, self.dir, start.step)
        resumed = await take_over(
            start, processes.gateway, TrajectoryFiles(self.dir), ledger.record, Rules.of(self.settings)
        )
        # Before an engine samples with this start's version: no later start may use the number again.
        await ledger.durable()
        if start.past.epoch:
            await self._report_resume(resumed, changed)
        return resumed

    async def _record_failure(self, ledger: Ledger, error: BaseException) -> None:
        """Record why the run failed before training began. The error itself is raised by the caller."""
        try:
            await record_failed_start(ledger, self.start, error)
        except (LedgerError, OSError) as failure:
            self.observer.note(f"the end of the run is not in the ledger: {failure}")

    def _live_weights(self) -> tuple[Path, int]:
        """Return the weights that engines should serve now, and their version."""
        if self._training is None:
            return self.start.weights, self.start.version
        return self._training.publisher.startable

    async def _load_policy(self, ranks: RankProcesses) -> TrainedPolicy:
        policy = await asyncio.to_thread(load_policy, self.settings)
        if policy is None:
            policy = await self._own_policy(ranks)
        if self.start.checkpoint is not None:
            await asyncio.to_thread(checkpoints.load, self.start.checkpoint, policy)
        return policy

    async def _own_policy(self, ranks: RankProcesses) -> TrainedPolicy:
        if self.settings.policies:
            return await asyncio.to_thread(load_policies, self.settings, self.start.weights)
        base = base_model(self.settings, self.start.weights)
        return await ranks.open(base, self.settings.run.seed, self._supervisor.watch)

    async def _report_resume(self, resumed: ResumedRun, changed: str) -> None:
        self.observer.note(
            f"resumed at step {self.start.step} as version {self.start.version}. Groups that had not ended: "
            f"{resumed.continued} continue, {len(resumed.stale)} are stale, "
            f"{len(resumed.cancelled)} are cancelled"
        )
        every = self.settings.trainer.checkpoint_every
        by_clients = self.settings.agent.source == "client"
        if by_clients and (lost := resumed.lost_feedback(self.start.step, every)) is not None:
            self.observer.note(lost)
        kept = resumed.admission.failures.quarantined - await asyncio.to_thread(requested_lifts, self.dir)
        if kept:
            self.observer.note(_still_quarantined(kept, self.settings.run_dir))
        if changed:
            self.observer.note(f"settings that differ from before: {changed}")
        self.observer.note(summary(await asyncio.to_thread(audit_run, self.dir)))


def _still_quarantined(tasks: Collection[str], run_dir: Path) -> str:
    named = ", ".join(sorted(tasks)[:MOST_NAMED])
    more = f" and {len(tasks) - MOST_NAMED} more" if len(tasks) > MOST_NAMED else ""
    what = "1 task is" if len(tasks) == 1 else f"{len(tasks)} tasks are"
    here = shlex.quote(str(run_dir))
    return (
        f"{what} in quarantine and not issued: {named}{more}. tidegate tasks {here} --quarantined lists the "
        f"reasons, tidegate tasks {here} --lift TASK (or --lift --all) issues them again"
    )


def _truncate_metrics(run_dir: Path, step: int) -> None:
    with MetricsLog(run_dir) as log:
        log.truncate_after(step)


def _translate_os_error(error: OSError, run_dir: Path) -> TidegateError:
    """Translate an OSError: a file error into StorageError, any other (say, of a connection) into a
    TidegateError that names the log with its traceback."""
    if (storage := storage_error(error, run_dir)) is not None:
        return storage
    log = run_dir / "logs" / "trainer-0.log"
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    return TidegateError(f"the run failed: {what}; the traceback is in {log}. Continue with --resume")
