"""One training run: starts its processes, connects the components, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.config import Settings, load_settings
from tidegate.devices import find_device
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, NoUsableEpisodesError, StorageError, TidegateError
from tidegate.observer import Observer
from tidegate.settings import sections
from tidegate.trainer.batch.batcher import Batcher
from tidegate.trainer.batch.credit import Credit, GroupCredit
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.ledger.audit import audit_run, summary
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.loop import Loop, run_to_completion, unless_stopped
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.processes.launcher import start_processes
from tidegate.trainer.processes.local import LocalProcesses
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.servers import restart_s
from tidegate.trainer.processes.supervisor import TaskSupervisor, every, watchdog
from tidegate.trainer.publish.broadcast import WeightBroadcaster
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.records.dead_letters import DeadLetters
from tidegate.trainer.records.metrics import MetricsLog, read_metrics
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.rollout.episodes import Episodes
from tidegate.trainer.rollout.evaluator import Evaluation, Evaluator
from tidegate.trainer.rollout.pause import Pause
from tidegate.trainer.rollout.rollout import Rollout, cancel_stale_groups
from tidegate.trainer.start import ResumedRun, Start, admission_rules, base_model, take_over

STATE_S = 0.5
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*DISK_FULL, errno.EIO, errno.EROFS)


@dataclass(slots=True)
class RunResult:
    """Result of a run; `initial_eval` and `final_eval` are metrics of its first and last evaluation."""

    status: str
    why: str | None
    step: int
    initial_eval: dict[str, float]
    final_eval: dict[str, float]


class Run:
    """A training run. `train()` is called once.

    Args:
        settings: Settings of the run.
        environment: Tasks and rewards.
        observer: Shows progress.
        start: Where to start; by default at the base model.
        credit: Computes advantages; by default as the settings say.
        provider: Provides the run's processes; by default on this machine.

    Raises:
        StartError, ConfigError: Before anything is written.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        observer: Observer,
        *,
        start: Start | None = None,
        credit: Credit | None = None,
        provider: ProcessProvider | None = None,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.observer = observer
        self.credit = credit or GroupCredit(settings.trainer)
        self.provider = provider or LocalProcesses()
        self.dir = settings.run_dir.absolute()
        find_device("trainer.device", settings.trainer.device)
        self.start = start or Start.of(settings, resume=False)
        self.initial_eval: dict[str, float] = {}
        self.final_eval: dict[str, float] = {}
        self.stop = asyncio.Event()
        self._began = time.monotonic()

    @property
    def steps_done(self) -> int:
        return self.loop.step if hasattr(self, "loop") else self.start.step

    # ------------------------------------------------------------------ phases

    async def train(self) -> RunResult:
        """Train to the last step, to `stop`, or to an error, and write a checkpoint in every case.

        Raises TidegateError after shutdown.
        """
        self._supervisor = TaskSupervisor()
        try:
            self._prepare()
            async with contextlib.AsyncExitStack() as stack:
                try:
                    await self._assemble(stack)
                    await self._train_and_end()
                finally:
                    await self._supervisor.close()
        except OSError as error:
            raise _translate_os_error(error, self.dir) from error
        status = "interrupted" if self.loop.step < self.settings.trainer.steps else "completed"
        return RunResult(status, None, self.loop.step, self.initial_eval, self.final_eval)

    async def _train_and_end(self) -> None:
        try:
            await self._supervisor.run(self._train())
        finally:
            await run_to_completion(self._end())

    async def _train(self) -> None:
        await self._initial_evaluation()
        if not self.stop.is_set() and self.loop.step < self.settings.trainer.steps:
            self._supervisor.watch(self.rollout.run(), "rollout")
            await self.loop.run()

    async def _end(self) -> None:
        """Cancel running groups, record the end, and commit."""
        await self.rollout.stop()
        self.ledger.record(entry("run", "ended", step=self.loop.step, version=self.admission.version))
        await self._checkpoint(self.loop.step)

    # ------------------------------------------------------------------ assembly

    def _prepare(self) -> None:
        for name in ("logs", "weights", "checkpoints", "trajectories"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        config = self.dir / "config.toml"
        self._changed = self._differences(config)
        part = self.dir / ".config.toml.partial"
        part.write_text(sections.dump(self.settings), encoding="utf-8")
        with failpoints.around("config"):
            part.replace(config)

    def _differences(self, config: Path) -> str:
        """Return the settings that differ from those before the resume."""
        if not (self.start.past.epoch and config.exists()):
            return ""
        try:
            return ", ".join(sections.differences(load_settings(config), self.settings))
        except ConfigError as error:
            return f"unknown, as the earlier settings cannot be read: {error}"

    async def _assemble(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        processes = self.provider.rank_processes(settings, self.dir)
        ranks = RankProcesses(settings.trainer, processes, self.provider.host)
        stack.push_async_callback(ranks.close)
        loading = asyncio.create_task(self._load_policy(ranks))
        stack.callback(loading.cancel)
        started = await start_processes(
            settings, self.dir, self._live, self._supervisor, self.observer.note, stack, self.provider
        )
        self.gateway, engines = started.gateway, started.engines
        self.policy = await loading
        self.ledger = stack.enter_context(Ledger(self.dir / "ledger.jsonl"))
        files = TrajectoryFiles(self.dir)
        log = MetricsLog(self.dir)
        # Before the ledger records that those steps are lost: an audit may compare the two at any time.
        log.truncate_after(self.start.step)
        resumed = await self._resume(files)
        self.admission = resumed.admission
        episodes = Episodes(
            self.gateway, started.worker, settings.agent.deadline_s, epoch=self.admission.epoch
        )
        self.tokens = TokenCounts()
        self.pause = Pause(self.admission, self.observer.note, settings.trainer.outage_s)
        engines.on_poll = self._set_serving
        self.rollout = Rollout(
            settings, self.admission, episodes, self.environment, files.append,
            DeadLetters(self.dir).write, self.pause, self.tokens,
        )  # fmt: skip
        self.batches = Batcher(
            self.gateway,
            self.admission,
            self.rollout.wake,
            GroupCredit(settings.trainer).should_train,
            self.tokens,
            self.rollout.answer,
        )
        for group in resumed.leased:
            self.batches.add(group)
        self.evaluator = Evaluator(
            settings,
            episodes,
            {name: list(tasks) for name, tasks in self.environment.eval_sets().items()},
            self.observer,
            files.evaluation,
            lambda: self.pause.engines_down,
        )
        self.recorder = Recorder(log, files, self.observer, self.snapshot, lambda: self.admission.version)
        self.publisher = self._publisher(engines, stack)
        engines.set_publisher(self.publisher)
        self.best = BestCheckpoint.open(self.dir)
        if settings.engine.urls:
            await self.publisher.update_all()
        await self.publisher.check_samples()
        self.loop = Loop(
            settings.trainer, self.admission, self.batches, self.policy, self.publisher, self.recorder,
            self._checkpoint, self._evaluate, self.credit, self.start.step, self.stop,
        )  # fmt: skip
        self._supervisor.watch(engines.watch(), "engines")
        self._supervisor.watch(watchdog(settings.patience_s, self._last_progress, self._describe), "watchdog")
        self._supervisor.watch(every(STATE_S, lambda: self.observer.state(self.snapshot())), "state")
        self._supervisor.watch(every(STATE_S, self.pause.check), "outage")

    def _publisher(self, engines: EngineMembership, stack: contextlib.AsyncExitStack) -> Publisher:
        settings = self.settings
        sender = None
        if settings.trainer.publish_transport == "broadcast":
            sender = WeightBroadcaster(
                self.policy.weight_buckets, self.observer.note, device=settings.trainer.device
            )
            stack.callback(sender.close)
        return Publisher(
            self.dir / "weights", self.policy.save_weights, engines.urls, self._cancel_stale_groups,
            engines.mark_unavailable, engines.restore, (self.start.weights, self.start.version),
            restart_s(settings.engine), sender,
            self.provider.deliver, lambda: self.pause.active and not self.stop.is_set(),
        )  # fmt: skip

    async def _load_policy(self, ranks: RankProcesses) -> Policy:
        base = base_model(self.settings, self.start.weights)
        policy = await ranks.open(base, self.settings.run.seed, self._supervisor.watch)
        if self.start.checkpoint is not None:
            await asyncio.to_thread(checkpoints.load, self.start.checkpoint, policy)
        return policy

    def _live(self) -> tuple[Path, int]:
        """Return the weights that engines should serve now, and their version."""
        return (
            self.publisher.current if hasattr(self, "publisher") else (self.start.weights, self.start.version)
        )

    async def _resume(self, files: TrajectoryFiles) -> ResumedRun:
        """Begin a new epoch of the ledger; if the run is resumed, report what continues."""
        start = self.start
        resumed = await take_over(
            start, self.gateway, files, self.ledger.record, admission_rules(self.settings)
        )
        if start.past.epoch:
            self.observer.note(
                f"resumed at step {start.step} as version {start.version}. Groups that had not ended: "
                f"{resumed.continued} continue, {len(resumed.stale)} are stale, "
                f"{len(resumed.cancelled)} are cancelled"
            )
            if self._changed:
                self.observer.note(f"settings that differ from before: {self._changed}")
            self.observer.note(summary(await asyncio.to_thread(audit_run, self.dir)))
        return resumed

    # ------------------------------------------------------------------ callbacks of the components

    async def _checkpoint(self, step: int) -> None:
        """Write a checkpoint, the commit point of all steps so far."""
        progress = self.admission.progress()
        state: dict[str, Any] = {
            "ledger": self.ledger.position,
            "ledger_checksum": self.ledger.checksum,
            "epoch": self.admission.epoch,
            "version": self.admission.version,
            "highest_version": self.admission.version,
            "cursor": progress.cursor,
            "tickets": [asdict(ticket) for ticket in progress.tickets],
        }
        self.ledger.sync()
        await asyncio.to_thread(checkpoints.save, self.dir, step, self.policy, state)
        self.admission.commit()
        # Until the first publish after a resume, engines serve and load the weights in its checkpoint.
        live = {self.start.step} if self.publisher.current[0] == self.start.weights else set()
        await asyncio.to_thread(checkpoints.prune, self.dir, self.settings.trainer.keep_checkpoints, live)

    async def _initial_evaluation(self) -> None:
        """Evaluate before the first step, unless an earlier start of the run did."""
        recorded = next((line for line in read_metrics(self.dir) if line["step"] == 0), None)
        if recorded is not None:
            self.initial_eval = {key: value for key, value in recorded.items() if key.startswith("eval/")}
            return
        evaluation = await unless_stopped(self.stop, self.evaluator.full(0))
        if evaluation is None:
            return
        if not any(episode.reward is not None for _, _, episode in evaluation.episodes):
            reason, number = evaluation.reasons.most_common(1)[0]
            raise NoUsableEpisodesError(
                f"no held-out episode succeeded; {number} of them failed with: {reason}"
            )
        self._note_failures(evaluation)
        await self._keep_best(0, evaluation.metrics)
        self.initial_eval = self.final_eval = evaluation.metrics
        self.recorder.step(0, dict(evaluation.metrics))

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation that is due at `step`, if any. No publish happens during it."""
        settings = self.settings.eval
        if step == self.settings.trainer.steps:
            await self.rollout.stop()
            due = self.evaluator.full(step)
        elif settings.every and step % settings.every == 0:
            due = self.evaluator.interim(step)
        else:
            return {}
        evaluation = await unless_stopped(self.stop, due)
        if evaluation is None:
            return {}
        self._note_failures(evaluation)
        await self._keep_best(step, evaluation.metrics)
        self.final_eval = evaluation.metrics
        return evaluation.metrics

    async def _keep_best(self, step: int, metrics: dict[str, float]) -> None:
        """Keep the weights that are live on the engines if they score best."""
        if "eval/reward" in metrics:
            weights, version = self.publisher.current
            await asyncio.to_thread(
                self.best.update_if_better, weights, step, version, metrics["eval/reward"]
            )

    def _note_failures(self, evaluation: Evaluation) -> None:
        for reason, number in evaluation.reasons.most_common(3):
            self.observer.note(f"evaluation: {number} episodes failed: {reason}")

    async def _cancel_stale_groups(self, version: int) -> None:
        await cancel_stale_groups(version, self.admission, self.gateway, self.rollout.end_stale)

    def _set_serving(self, serving: bool) -> None:
        self.pause.set_serving(serving)
        self.rollout.wake()

    def _last_progress(self) -> float:
        if self.pause.active:
            return time.monotonic()  # a pause has its own limit
        return max(
            self._began, self.rollout.last_progress, self.batches.last_progress, self.evaluator.last_progress
        )

    def _describe(self) -> str:
        counts = ", ".join(
            f"{number} {state}" for state, number in self.admission.group_counts.items() if number
        )
        phases = [group.phase.value for group in self.admission.groups.values()]
        outstanding = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))) or "none"
        failure = f"; the last failure: {self.rollout.last_failure}" if self.rollout.last_failure else ""
        return (
            f"the trainer waits for {self.settings.trainer.groups_per_batch} ready groups at step "
            f"{self.loop.step}. Groups outstanding: {outstanding}. Ledger: {counts or 'empty'}{failure}"
        )

    def snapshot(self) -> dict[str, float]:
        """Return counts of groups, attempts, episodes and tokens."""
        admission, rollout = self.admission, self.rollout
        counts = {f"groups/{state}": float(admission.group_counts[state]) for state in State}
        phases = [group.phase.value for group in admission.groups.values()]
        return {
            **counts,
            "groups/live": float(phases.count("running")),
            "groups/ready": float(phases.count("ready")),
            "groups/leased": float(phases.count("leased")),
            "groups/quarantined_tasks": float(len(admission.quarantined)),
            "attempts/live": float(admission.attempt_counts[State.LIVE]),
            "attempts/failed": float(admission.attempt_counts[State.FAILED]),
            "episodes": float(rollout.finished_episodes),
            "tokens/sampled_total": float(rollout.sampled_tokens),
            "version": float(admission.version),
            **self.pause.metrics(),
            **self.tokens.metrics(),
        }


def _translate_os_error(error: OSError, run_dir: Path) -> TidegateError:
    """Translate an OSError: a file error into StorageError, any other (say, of a connection) into a
    TidegateError that names the log with its traceback."""
    if error.filename or error.errno in DISK_ERRORS:
        remedy = "free some space" if error.errno in DISK_FULL else "make it accessible"
        where = error.filename or run_dir
        return StorageError(f"{where}: {error.strerror or error}; {remedy}, then continue with --resume")
    log = run_dir / "logs" / "trainer-0.log"
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    return TidegateError(f"the run failed: {what}; the traceback is in {log}. Continue with --resume")
