"""One training run: starts its processes, puts the parts together, and ends them in order."""

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
from tidegate.errors import ConfigError, HopelessError, StorageError, TidegateError
from tidegate.observer import Observer
from tidegate.settings import sections
from tidegate.trainer.batch.batcher import Batcher
from tidegate.trainer.batch.credit import Credit, GroupCredit
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.distributed.ranks import Ranks
from tidegate.trainer.ledger.audit import audit_run, summary
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.loop import Loop, unless, whole
from tidegate.trainer.policy.policy import Learner
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
from tidegate.trainer.rollout.rollout import Rollout, cancel_doomed
from tidegate.trainer.start import ResumedRun, Start, base_model, rules_of, take_over

STATE_S = 0.5
FULL = (errno.ENOSPC, errno.EDQUOT)
OF_DISKS = (*FULL, errno.EIO, errno.EROFS)


@dataclass(slots=True)
class RunResult:
    """What came of a run; `before` and `after` are the metrics of its first and last evaluation."""

    status: str
    why: str | None
    step: int
    before: dict[str, float]
    after: dict[str, float]


class Run:
    """A run, put together. `train()` is called once. `start` is where it goes on, from the base model by
    default; `credit` replaces the settings' advantages, and `parts` says where its processes are, on this
    machine by default. Raises StartError or ConfigError before anything is written."""

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        observer: Observer,
        *,
        start: Start | None = None,
        credit: Credit | None = None,
        parts: ProcessProvider | None = None,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.observer = observer
        self.credit = credit or GroupCredit(settings.trainer)
        self.parts = parts or LocalProcesses()
        self.dir = settings.run_dir.absolute()
        find_device("trainer.device", settings.trainer.device)
        self.start = start or Start.of(settings, resume=False)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.stop = asyncio.Event()
        self._began = time.monotonic()

    @property
    def steps_done(self) -> int:
        return self.loop.step if hasattr(self, "loop") else self.start.step

    # ------------------------------------------------------------------ the run, from begin to end

    async def train(self) -> RunResult:
        """Train to the end, to `stop`, or to an error; whatever happens, a checkpoint says where it is.

        Raises TidegateError after everything was put in order.
        """
        self._guard = TaskSupervisor()
        try:
            self._prepare()
            async with contextlib.AsyncExitStack() as stack:
                try:
                    await self._assemble(stack)
                    await self._to_the_end()
                finally:
                    await self._guard.close()
        except OSError as error:
            raise _in_words(error, self.dir) from error
        status = "interrupted" if self.loop.step < self.settings.trainer.steps else "completed"
        return RunResult(status, None, self.loop.step, self.before, self.after)

    async def _to_the_end(self) -> None:
        try:
            await self._guard.run(self._train())
        finally:
            await whole(self._end())

    async def _train(self) -> None:
        await self._first_look()
        if not self.stop.is_set() and self.loop.step < self.settings.trainer.steps:
            self._guard.watch(self.rollout.run(), "rollout")
            await self.loop.run()

    async def _end(self) -> None:
        """Account for what is left, then commit."""
        await self.rollout.stop()
        self.ledger.book(entry("run", "ended", step=self.loop.step, version=self.admission.version))
        await self._checkpoint(self.loop.step)

    # ------------------------------------------------------------------ putting it together

    def _prepare(self) -> None:
        for name in ("logs", "weights", "checkpoints", "trajectories"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        kept = self.dir / "config.toml"
        self._changed = self._differences(kept)
        part = self.dir / ".config.toml.partial"
        part.write_text(sections.dump(self.settings), encoding="utf-8")
        with failpoints.around("config"):
            part.replace(kept)

    def _differences(self, kept: Path) -> str:
        """What is set otherwise than before, of a run that is gone on with."""
        if not (self.start.past.epoch and kept.exists()):
            return ""
        try:
            return ", ".join(sections.differences(load_settings(kept), self.settings))
        except ConfigError as error:
            return f"not known, as those before cannot be read: {error}"

    async def _assemble(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        ranks = Ranks(settings.trainer, self.parts.rank_processes(settings, self.dir), self.parts.host)
        stack.push_async_callback(ranks.close)
        loading = asyncio.create_task(self._load_policy(ranks))
        stack.callback(loading.cancel)
        processes = await start_processes(
            settings, self.dir, self._live, self._guard, self.observer.note, stack, self.parts
        )
        self.gateway, engines = processes.gateway, processes.engines
        self.policy = await loading
        self.ledger = stack.enter_context(Ledger(self.dir / "ledger.jsonl"))
        files = TrajectoryFiles(self.dir)
        log = MetricsLog(self.dir)
        # Before the book says that those steps are lost: it is held against these lines at any moment.
        log.truncate_after(self.start.step)
        opened = await self._open_book(files)
        self.admission = opened.admission
        episodes = Episodes(
            self.gateway, processes.worker, settings.agent.deadline_s, epoch=self.admission.epoch
        )
        self.tokens = TokenCounts()
        self.pause = Pause(self.admission, self.observer.note, settings.trainer.outage_s)
        engines.on_look = self._engines_seen
        self.rollout = Rollout(
            settings, self.admission, episodes, self.environment, files.lost,
            DeadLetters(self.dir).write, self.pause, self.tokens,
        )  # fmt: skip
        self.batches = Batcher(
            self.gateway,
            self.admission,
            self.rollout.wake,
            GroupCredit(settings.trainer).keeps,
            self.tokens,
            self.rollout.answer,
        )
        for group in opened.held:
            self.batches.hold(group)
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
        engines.lead(self.publisher)
        self.best = BestCheckpoint.of(self.dir)
        if settings.engine.urls:
            await self.publisher.bring_all()
        await self.publisher.check_samples()
        self.loop = Loop(
            settings.trainer, self.admission, self.batches, self.policy, self.publisher, self.recorder,
            self._checkpoint, self._evaluate, self.credit, self.start.step, self.stop,
        )  # fmt: skip
        self._guard.watch(engines.watch(), "engines")
        self._guard.watch(watchdog(settings.patience_s, self._last_progress, self._describe), "watchdog")
        self._guard.watch(every(STATE_S, lambda: self.observer.state(self.snapshot())), "state")
        self._guard.watch(every(STATE_S, self.pause.check), "outage")

    def _publisher(self, engines: EngineMembership, stack: contextlib.AsyncExitStack) -> Publisher:
        settings = self.settings
        sender = None
        if settings.trainer.publish_transport == "broadcast":
            sender = WeightBroadcaster(
                self.policy.weight_buckets, self.observer.note, device=settings.trainer.device
            )
            stack.callback(sender.close)
        return Publisher(
            self.dir / "weights", self.policy.save_weights, engines.urls, self._cancel_doomed, engines.hold,
            engines.restore, (self.start.weights, self.start.version), restart_s(settings.engine), sender,
            self.parts.place, lambda: self.pause.on and not self.stop.is_set(),
        )  # fmt: skip

    async def _load_policy(self, ranks: Ranks) -> Learner:
        base = base_model(self.settings, self.start.weights)
        policy = await ranks.open(base, self.settings.run.seed, self._guard.watch)
        if self.start.checkpoint is not None:
            await asyncio.to_thread(checkpoints.load, self.start.checkpoint, policy)
        return policy

    def _live(self) -> tuple[Path, int]:
        """What engines should serve at this moment."""
        return self.publisher.live if hasattr(self, "publisher") else (self.start.weights, self.start.version)

    async def _open_book(self, files: TrajectoryFiles) -> ResumedRun:
        """Go on with the ledger; of a resumed run, put right what its death left, and say what it was."""
        start = self.start
        opened = await take_over(start, self.gateway, files, self.ledger.book, rules_of(self.settings))
        if start.past.epoch:
            self.observer.note(
                f"resumed at step {start.step} as version {start.version}. Of the groups behind it "
                f"{opened.going} go on and {len(opened.stale)} are stale by now; {len(opened.cancelled)} in "
                "flight are cancelled"
            )
            if self._changed:
                self.observer.note(f"settings that differ from before: {self._changed}")
            self.observer.note(summary(await asyncio.to_thread(audit_run, self.dir)))
        return opened

    # ------------------------------------------------------------------ what the parts ask for

    async def _checkpoint(self, step: int) -> None:
        """The commit point: everything up to here is trained for good."""
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
        # Until the first publish after a resume, what engines serve and come up with is in its checkpoint.
        live = {self.start.step} if self.publisher.live[0] == self.start.weights else set()
        await asyncio.to_thread(checkpoints.prune, self.dir, self.settings.trainer.keep_checkpoints, live)

    async def _first_look(self) -> None:
        """The held-out reward before the first step; the yardstick for everything after it."""
        known = next((line for line in read_metrics(self.dir) if line["step"] == 0), None)
        if known is not None:
            self.before = {key: value for key, value in known.items() if key.startswith("eval/")}
            return
        found = await unless(self.stop, self.evaluator.full(0))
        if found is None:
            return
        if not any(episode.reward is not None for _, _, episode in found.episodes):
            reason, number = found.reasons.most_common(1)[0]
            raise HopelessError(f"no held-out episode succeeded; {number} of them: {reason}")
        self._note_failures(found)
        await self._keep_best(0, found.metrics)
        self.before = self.after = found.metrics
        self.recorder.step(0, dict(found.metrics))

    async def _evaluate(self, step: int) -> dict[str, float]:
        """The evaluation due at `step`, if any. It stands between two publishes, so it sees one version."""
        settings = self.settings.eval
        if step == self.settings.trainer.steps:
            await self.rollout.stop()
            due = self.evaluator.full(step)
        elif settings.every and step % settings.every == 0:
            due = self.evaluator.interim(step)
        else:
            return {}
        found = await unless(self.stop, due)
        if found is None:
            return {}
        self._note_failures(found)
        await self._keep_best(step, found.metrics)
        self.after = found.metrics
        return found.metrics

    async def _keep_best(self, step: int, metrics: dict[str, float]) -> None:
        """What was evaluated is what is live on the engines."""
        if "eval/reward" in metrics:
            weights, version = self.publisher.live
            await asyncio.to_thread(self.best.offer, weights, step, version, metrics["eval/reward"])

    def _note_failures(self, found: Evaluation) -> None:
        for reason, number in found.reasons.most_common(3):
            self.observer.note(f"evaluation: {number} episodes failed: {reason}")

    async def _cancel_doomed(self, version: int) -> None:
        await cancel_doomed(version, self.admission, self.gateway, self.rollout.end_stale)

    def _engines_seen(self, serving: bool) -> None:
        self.pause.engines(serving)
        self.rollout.wake()

    def _last_progress(self) -> float:
        if self.pause.on:
            return time.monotonic()  # it waits, within a limit of its own
        return max(
            self._began, self.rollout.last_progress, self.batches.last_progress, self.evaluator.last_progress
        )

    def _describe(self) -> str:
        counts = ", ".join(
            f"{number} {state}" for state, number in self.admission.group_counts.items() if number
        )
        phases = [group.phase.value for group in self.admission.groups.values()]
        where = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))) or "none"
        failure = f"; the last failure: {self.rollout.last_failure}" if self.rollout.last_failure else ""
        return (
            f"the trainer waits for {self.settings.trainer.groups_per_batch} ready groups at step "
            f"{self.loop.step}. Groups outstanding: {where}. Ledger: {counts or 'empty'}{failure}"
        )

    def snapshot(self) -> dict[str, float]:
        """The groups and attempts by state, and how far rollout is."""
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


def _in_words(error: OSError, run_dir: Path) -> TidegateError:
    """What an error of the operating system means for a run: files that cannot be had, or anything else, such
    as a connection or a deadline, whose traceback is kept in the log."""
    if error.filename or error.errno in OF_DISKS:
        remedy = "make room" if error.errno in FULL else "make it usable"
        where = error.filename or run_dir
        return StorageError(f"{where}: {error.strerror or error}; {remedy}, then go on with --resume")
    log = run_dir / "logs" / "trainer-0.log"
    with log.open("a", encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    what = ": ".join(part for part in (type(error).__name__, str(error)) if part)
    return TidegateError(f"the run failed of {what}; {log} says where. Go on with --resume")
