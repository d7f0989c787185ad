"""One training run on one machine: starts its processes, puts the parts together, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidegate.config import Settings, dump_settings
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, GatewayError, HopelessError, StartError, TidegateError
from tidegate.gateway.client import GatewayClient
from tidegate.observer import Observer
from tidegate.trainer import checkpoint as checkpoints
from tidegate.trainer.admission import Admission, Progress, Rules, Ticket
from tidegate.trainer.batches import Batches, Credit, group_credit
from tidegate.trainer.entries import State, entry
from tidegate.trainer.evaluate import Evaluation, Evaluator
from tidegate.trainer.guard import Guard, every, watchdog
from tidegate.trainer.ledger import Ledger
from tidegate.trainer.loop import Loop, whole
from tidegate.trainer.metrics import MetricsLog
from tidegate.trainer.policy import Policy
from tidegate.trainer.publish import Publisher
from tidegate.trainer.record import Recorder
from tidegate.trainer.resume import Past, bury, read_past
from tidegate.trainer.rollout import Episodes, Rollout, cancel_doomed
from tidegate.trainer.services import Service
from tidegate.trainer.trajectories import TrajectoryFiles
from tidegate.trainer.workers import AgentWorker

MAX_ENGINE_RESTARTS = 5
STATE_S = 0.5


@dataclass(slots=True)
class Start:
    """Where a run begins: at the base model, or at a checkpoint with what the ledger remembers."""

    weights: Path
    step: int = 0
    version: int = 0
    past: Past = field(default_factory=Past)
    checkpoint: checkpoints.Checkpoint | None = None

    @classmethod
    def of(cls, settings: Settings, resume: bool) -> Start:
        """Raises ConfigError where the directory is taken, or holds nothing to resume."""
        run_dir = settings.run_dir
        used = (run_dir / "ledger.jsonl").exists()
        if not resume:
            if used:
                raise ConfigError(
                    f"{run_dir} holds a run already: go on with it (--resume), choose another run.name, "
                    "or set it aside (--fresh)"
                )
            return cls(settings.model.path)
        if not used:
            raise ConfigError(f"{run_dir} holds no run to resume; leave --resume out to start one")
        past = read_past(run_dir / "ledger.jsonl")
        found = checkpoints.latest(run_dir)
        version = past.highest_version + 1
        if found is None:
            return cls(settings.model.path, 0, version, past)
        return cls(found.path, found.step, version, past, found)

    @property
    def position(self) -> int:
        """The ledger's position in the marker that is gone on from."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state["ledger"])


@dataclass(slots=True)
class Result:
    """What came of a run; `before` and `after` are the metrics of its first and last evaluation."""

    status: str
    why: str | None
    step: int
    before: dict[str, float]
    after: dict[str, float]


class Run:
    """A run, put together. `train()` is called once. `credit` replaces the settings' advantages."""

    def __init__(
        self,
        settings: Settings,
        environment: Environment,
        observer: Observer,
        *,
        resume: bool = False,
        credit: Credit | None = None,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.observer = observer
        self.credit = credit or group_credit(settings.trainer.normalize_advantage)
        self.dir = settings.run_dir.absolute()
        self.start = Start.of(settings, resume)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.stop = asyncio.Event()
        self._guard = Guard()
        self._services: list[Service] = []
        self._began = time.monotonic()

    @property
    def steps_done(self) -> int:
        return self.loop.step if hasattr(self, "loop") else self.start.step

    def kill(self) -> None:
        """End the owned processes at once: a second Ctrl-C."""
        for service in self._services:
            service.kill()

    # ------------------------------------------------------------------ the run, from begin to end

    async def train(self) -> Result:
        """Train to the end, to `stop`, or to an error; whatever happens, a checkpoint says where it is.

        Raises TidegateError after everything was put in order.
        """
        self._prepare()
        async with contextlib.AsyncExitStack() as stack:
            await self._assemble(stack)
            try:
                await self._guard.run(self._train())
                status = "interrupted" if self.stop.is_set() else "completed"
                return Result(status, None, self.loop.step, self.before, self.after)
            except TidegateError as error:
                self.observer.note(f"stopping: {error}")
                raise
            finally:
                await whole(self._end())

    async def _train(self) -> None:
        if self.start.checkpoint is None and self.start.step == 0:
            await self._first_look()
        if not self.stop.is_set():
            self._guard.watch(self.rollout.run(), "rollout")
            await self.loop.run()

    async def _end(self) -> None:
        """Account for what is left, then commit."""
        await self.rollout.stop()
        await self._guard.close()
        self.ledger.book(entry("run", "ended", step=self.loop.step, version=self.admission.version))
        await self._checkpoint(self.loop.step)

    # ------------------------------------------------------------------ putting it together

    def _prepare(self) -> None:
        for name in ("logs", "weights", "checkpoints", "trajectories"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        (self.dir / "config.toml").write_text(dump_settings(self.settings), encoding="utf-8")

    async def _assemble(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.settings
        policy = asyncio.create_task(asyncio.to_thread(self._load_policy))
        stack.callback(policy.cancel)
        engines = await self._start_engines(stack)
        self.gateway = await self._start_gateway(stack, engines)
        worker = await AgentWorker.start(
            settings.agent.use, settings.agent.options, self.dir / "logs" / "agent.log"
        )
        stack.push_async_callback(worker.close)
        self.policy = await policy
        self.ledger = stack.enter_context(Ledger(self.dir / "ledger.jsonl"))
        self.admission = self._open_book()
        episodes = Episodes(self.gateway, worker, settings.agent.deadline_s)
        files = TrajectoryFiles(self.dir)
        self.rollout = Rollout(settings, self.admission, episodes, self.environment, files.failure)
        self.batches = Batches(self.gateway, self.admission, self.rollout.wake)
        self.evaluator = Evaluator(
            settings,
            episodes,
            {name: list(tasks) for name, tasks in self.environment.eval_sets().items()},
            self.observer,
            files.evaluation,
        )
        log = MetricsLog(self.dir)
        log.truncate_after(self.start.step)
        self.recorder = Recorder(log, files, self.observer, self.snapshot, lambda: self.admission.version)
        self.publisher = Publisher(
            self.dir / "weights", self.policy.save_weights, lambda: engines, self._cancel_doomed,
            self._quarantine_engine, (self.start.weights, self.start.version),
        )  # fmt: skip
        self.loop = Loop(
            settings.trainer, self.admission, self.batches, self.policy, self.publisher, self.recorder,
            self._checkpoint, self._evaluate, self.credit, self.start.step, self.stop,
        )  # fmt: skip
        self._guard.watch(
            watchdog(settings.trainer.watchdog_s, self._last_progress, self._describe), "watchdog"
        )
        self._guard.watch(every(STATE_S, lambda: self.observer.state(self.snapshot())), "state")

    def _load_policy(self) -> Policy:
        policy = Policy.load(self.start.weights, self.settings.trainer, self.settings.run.seed)
        if self.start.checkpoint is not None:
            checkpoints.load(self.start.checkpoint, policy)
        return policy

    def _open_book(self) -> Admission:
        """Admission as the ledger and the checkpoint left it, in a new epoch."""
        trainer, start = self.settings.trainer, self.start
        rules = Rules(
            groups_per_batch=trainer.groups_per_batch,
            group_size=trainer.group_size,
            min_group_size=trainer.smallest_group,
            max_staleness=trainer.staleness_bound,
            publish_interval=trainer.publish_interval,
            max_attempts=trainer.max_attempts,
            max_stale_retries=trainer.max_stale_retries,
            max_running=max(1, self.settings.agent.max_concurrency // trainer.group_size),
        )
        epoch = start.past.epoch + 1
        position = start.position if epoch > 1 else None
        self.ledger.book(
            entry("run", "started", epoch=epoch, step=start.step, version=start.version, position=position)
        )
        start.past.abandon(start.position)
        lost = bury(start.past, self.ledger.book)
        admission = Admission(rules, self.ledger.book, epoch=epoch, version=start.version)
        admission.group_counts += start.past.counts(start.past.groups, start.position)
        admission.attempt_counts += start.past.counts(start.past.attempts, start.position)
        if start.checkpoint is not None:
            state = start.checkpoint.state
            progress = Progress(
                state["cursor"], [Ticket(**ticket) for ticket in state["tickets"]], state["quarantined"]
            )
            admission.restore(progress, [range(state["version"] + 1, start.version)])
            self.observer.note(
                f"resumed at step {start.step} as version {start.version}; {lost} groups were in flight and "
                "are cancelled, their tasks are issued again"
            )
        return admission

    async def _start_engines(self, stack: contextlib.AsyncExitStack) -> list[str]:
        settings = self.settings.engine
        if settings.urls:
            return list(settings.urls)
        began = time.monotonic()
        engine = Service("engine", self._engine_arguments, self.dir)
        self._services.append(engine)
        stack.push_async_callback(engine.stop)
        url = await engine.start()
        self.observer.note(f"engine ready in {time.monotonic() - began:.1f} s at {url}")
        self._guard.watch(self._keep_engine(engine), "engine")
        return [url]

    def _engine_arguments(self) -> Sequence[str]:
        publisher = getattr(self, "publisher", None)
        weights, version = (self.start.weights, self.start.version) if publisher is None else publisher.live
        engine = self.settings.engine
        return [
            "--model", str(weights.absolute()), "--weight-version", str(version), "--device", engine.device,
            "--dtype", engine.dtype, "--threads", str(engine.threads),
            "--max-slots", str(engine.max_slots), "--max-context", str(engine.max_context),
        ]  # fmt: skip

    async def _keep_engine(self, engine: Service) -> None:
        """Restart a dead engine at the current version; give up after MAX_ENGINE_RESTARTS."""
        while True:
            how = await engine.died()
            if engine.restarts >= MAX_ENGINE_RESTARTS:
                raise StartError(f"{how}, after {engine.restarts} restarts; {engine.last_words()}")
            self.observer.note(f"{how}; starting it again")
            await engine.restart()
            self.observer.note(f"engine back at version {self._engine_arguments()[3]}")

    async def _start_gateway(self, stack: contextlib.AsyncExitStack, engines: list[str]) -> GatewayClient:
        settings = self.settings
        arguments = [
            "--model", str(settings.model.path), "--host", settings.gateway.host,
            "--tool-parser", settings.gateway.tool_parser,
            "--env", settings.env.use, "--env-options", json.dumps(settings.env.options),
        ]  # fmt: skip
        for url in engines:
            arguments += ["--engine", url]
        if settings.gateway.admin_key is not None:
            arguments += ["--admin-key", settings.gateway.admin_key]
        port = ["--port", str(settings.gateway.port)] if settings.gateway.port else []
        service = Service("gateway", lambda: [*arguments, *port], self.dir)
        self._services.append(service)
        stack.push_async_callback(service.stop)
        url = await service.start()
        self._guard.watch(self._keep_gateway(service), "gateway")
        client = GatewayClient(url, settings.gateway.admin_key)
        stack.push_async_callback(client.close)
        self.observer.note(f"gateway at {url}")
        return client

    async def _keep_gateway(self, gateway: Service) -> None:
        how = await gateway.died()
        raise GatewayError(f"{how}; the sessions it held are lost. {gateway.last_words()}")

    # ------------------------------------------------------------------ what the parts ask for

    async def _checkpoint(self, step: int) -> None:
        """The commit point: everything up to here is trained for good."""
        progress = self.admission.progress()
        state: dict[str, Any] = {
            "ledger": self.ledger.position,
            "epoch": self.admission.epoch,
            "version": self.admission.version,
            "highest_version": self.admission.version,
            "cursor": progress.cursor,
            "tickets": [asdict(ticket) for ticket in progress.tickets],
            "quarantined": progress.quarantined,
        }
        self.ledger.sync()
        await asyncio.to_thread(checkpoints.save, self.dir, step, self.policy, state)
        self.admission.commit()
        await asyncio.to_thread(checkpoints.prune, self.dir, self.settings.trainer.keep_checkpoints)

    async def _first_look(self) -> None:
        """The held-out reward before the first step; the yardstick for everything after it."""
        found = await self.evaluator.full(0)
        if not any(episode.reward is not None for _, _, episode in found.episodes):
            reason, number = found.reasons.most_common(1)[0]
            raise HopelessError(f"no held-out episode succeeded; {number} of them: {reason}")
        self._note_failures(found)
        self.before = self.after = found.metrics
        self.recorder.step(0, dict(found.metrics))

    async def _evaluate(self, step: int) -> dict[str, float]:
        """The evaluation due at `step`, if any. It stands between two publishes, so it sees one version."""
        settings = self.settings.eval
        if step == self.settings.trainer.steps:
            await self.rollout.stop()
            found = await self.evaluator.full(step)
        elif settings.every and step % settings.every == 0:
            found = await self.evaluator.interim(step)
        else:
            return {}
        self._note_failures(found)
        self.after = found.metrics
        return found.metrics

    def _note_failures(self, found: Evaluation) -> None:
        for reason, number in found.reasons.most_common(3):
            self.observer.note(f"evaluation: {number} episodes failed: {reason}")

    async def _cancel_doomed(self, version: int) -> None:
        await cancel_doomed(version, self.admission, self.gateway, self.rollout.end_stale)

    async def _quarantine_engine(self, url: str, why: str) -> None:
        self.observer.note(f"engine {url} is out of service: {why}")
        await self.gateway.remove_engine(url)

    def _last_progress(self) -> float:
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
        }
