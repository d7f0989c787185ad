"""The started components of a run, and the calls between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from functools import partial

from tidegate.config import Settings
from tidegate.envs.base import Environment
from tidegate.errors import GatewayError, LedgerError
from tidegate.observer import Observer
from tidegate.trainer.batch.batcher import Batcher, GroupFilter
from tidegate.trainer.batch.credit import BaselineCredit, CreditAssignment, RunningMeans
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.checkpointing import RunCheckpoints
from tidegate.trainer.end import RunResult, how_failed
from tidegate.trainer.evaluations import RunEvaluations
from tidegate.trainer.forecast import episodes_at_a_time, forecast, measure_rate
from tidegate.trainer.ledger.entries import State, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.loop import Loop
from tidegate.trainer.policy.protocol import TrainedPolicy
from tidegate.trainer.processes.launcher import Processes
from tidegate.trainer.processes.provider import ProcessProvider
from tidegate.trainer.processes.servers import JUDGE_CACHE
from tidegate.trainer.processes.supervisor import TaskSupervisor, every, watchdog
from tidegate.trainer.publish.canary import write_state
from tidegate.trainer.publish.candidate_engines import CandidateEngines
from tidegate.trainer.publish.gate import PublishGate
from tidegate.trainer.publish.promotion import Promotion
from tidegate.trainer.publish.version_requests import clear_request, read_request
from tidegate.trainer.records.client_log import ClientLog
from tidegate.trainer.records.dead_letters import DeadLetters
from tidegate.trainer.records.erasure import Erasure
from tidegate.trainer.records.judge import JudgeRecord
from tidegate.trainer.records.lift_requests import watch_lifts
from tidegate.trainer.records.load import LoadLog
from tidegate.trainer.records.metrics import MetricsLog, reached
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.trainer.resume import ResumedRun
from tidegate.trainer.rollout.background_evaluation import BackgroundEvaluation
from tidegate.trainer.rollout.episodes import EpisodeSource, watch_workers
from tidegate.trainer.rollout.evaluator import Episode, Evaluator
from tidegate.trainer.rollout.pause import NO_ENGINE, NO_WORKER, Pause
from tidegate.trainer.rollout.rollout import Rollout
from tidegate.trainer.run_publisher import make_publisher
from tidegate.trainer.start import Start
from tidegate.trainer.status import RunStatus
from tidegate.trainer.teacher.teacher import Teacher
from tidegate.trainer.waits import run_to_completion, unless_stopped
from tidegate.types import Group, Trajectory

STATE_S = 0.5


class Training:
    """The components of a run whose processes have started.

    Args:
        settings: Settings of the run.
        start: Where the run starts.
        environment: Tasks and rewards.
        observer: Shows progress.
        credit: Computes advantages.
        provider: Provides the run's processes.
        processes: Clients of these processes.
        policy: The loaded policy.
        ledger: The open ledger.
        resumed: Admission, and the groups that continue.
        supervisor: Runs the watchers beside the training.
        stop: Set when the run is to end after the current step.
        result: Updated by evaluations and at the end.
        stack: Closes what is opened here.
        teacher: Scores sampled tokens; None without distillation.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        start: Start,
        environment: Environment,
        observer: Observer,
        credit: CreditAssignment,
        provider: ProcessProvider,
        processes: Processes,
        policy: TrainedPolicy,
        ledger: Ledger,
        resumed: ResumedRun,
        supervisor: TaskSupervisor,
        stop: asyncio.Event,
        result: RunResult,
        stack: contextlib.AsyncExitStack,
        teacher: Teacher | None = None,
    ) -> None:
        self.settings, self.start, self.stop, self.result = settings, start, stop, result
        self.supervisor = supervisor
        self._by_clients = settings.agent.source == "client"
        """Whether clients form the groups: the run then issues and evaluates none."""
        self.dir = settings.run_dir.absolute()
        self.observer, self.provider = observer, provider
        self.gateway, self.engines = processes.gateway, processes.engines
        self.policy, self.ledger, self.admission = policy, ledger, resumed.admission
        self.tokens, self.teacher = TokenCounts(), teacher
        files, judge, self.writer = TrajectoryFiles(self.dir), JudgeRecord(), FileWriter()
        stack.push_async_callback(self.writer.close)

        async def save(trajectories: Sequence[Trajectory], state: State) -> None:
            judge.add(trajectories)
            await self.writer.run(files.append, trajectories, state)

        async def save_dropped(group: Group, state: State) -> None:
            await self.writer.run(files.drop, group, state, self.loop.step + 1)

        async def save_evaluation(step: int, episodes: list[Episode]) -> None:
            judge.add(trajectory for _, _, trajectory in episodes)
            await self.writer.run(files.evaluation, step, episodes)

        epoch = self.admission.epoch
        episodes = EpisodeSource.of(settings.agent, self.gateway, epoch)
        self.pause = Pause(admission=self.admission, note=observer.note, limit_s=settings.trainer.outage_s)
        self.rollout = Rollout(
            settings=settings, admission=self.admission, episodes=episodes, tasks=environment, save=save,
            dead_letter=partial(self.writer.run, DeadLetters(self.dir).write), pause=self.pause,
            tokens=self.tokens,
        )  # fmt: skip
        self.clients = ClientLog(self.dir)
        self.batches = Batcher(
            gateway=self.gateway, admission=self.admission, on_freed=self.rollout.wake,
            should_train=BaselineCredit(settings.trainer).should_train,
            tokens=self.tokens, answer=self.rollout.answer,
            offered=partial(self.writer.run, self.clients.offered), save=save_dropped,
            scorer=teacher, own_filter=None if (use := settings.trainer.filter) is None else GroupFilter(use),
            clients_form_groups=self._by_clients,
        )  # fmt: skip
        for group in resumed.leased:
            self.batches.add(group)
        sets = {name: list(tasks) for name, tasks in environment.eval_sets().items()}
        self.evaluator = Evaluator(
            settings=settings, episodes=episodes, sets=sets, observer=observer, save=save_evaluation,
            engines_down=lambda: self.pause.engines_down,
            pace=self.admission.pace,
        )  # fmt: skip
        self.status = RunStatus(
            admission=self.admission, rollout=self.rollout, batches=self.batches, evaluator=self.evaluator,
            pause=self.pause, tokens=self.tokens, teacher=teacher,
        )  # fmt: skip
        self.recorder = Recorder(
            MetricsLog(self.dir), files, observer, self.status.snapshot, lambda: self.admission.version,
            judge, self.writer,
        )  # fmt: skip
        # A credit assignment of the user's own has no means; a checkpoint then holds none.
        means = credit.means if isinstance(credit, BaselineCredit) else RunningMeans()
        if start.checkpoint is not None:
            means.restore(start.checkpoint.state.get("baseline", {}))
        self.erasure = Erasure(
            gateway=self.gateway, files=files, judge=self.dir / JUDGE_CACHE, writer=self.writer,
            ledger=ledger, done=start.past.erased, note=observer.note, withdraw=self.batches.withdraw,
        )  # fmt: skip
        self.publisher = make_publisher(
            settings=settings, start=start, policy=policy, engines=self.engines,
            provider=provider, ledger=ledger, cancel_stale=self.rollout.cancel_stale,
            # A run that is to stop does not wait for an outage to end.
            in_outage=lambda: self.pause.active and not stop.is_set(), note=observer.note, stack=stack,
        )  # fmt: skip
        # The publisher needs the engines and they need the publisher: one of the two is set later.
        self.engines.on_poll = self._on_poll
        self.engines.publisher = self.publisher
        trainer = settings.trainer
        self.gate = PublishGate(self.gateway, trainer, stop)
        self.promotion = None if trainer.promotion.mode == "always" else self._promotion()
        self.evaluations = RunEvaluations(
            settings=settings, evaluator=self.evaluator, publisher=self.publisher,
            beside=self._background_evaluation() if settings.eval.beside_training else None,
            best=BestCheckpoint.open(self.dir), stop_rollout=self.rollout.stop, record=self.recorder.step,
            note=observer.note, stop=stop, result=result,
        )  # fmt: skip
        self.checkpoints = RunCheckpoints(
            run_dir=self.dir, start=start, policy=policy, admission=self.admission, ledger=ledger,
            means=means, publisher=self.publisher, promotion=self.promotion, supervisor=supervisor,
            keep=trainer.keep_checkpoints,
        )  # fmt: skip
        self.loop = Loop(
            settings=settings.trainer, admission=self.admission, batches=self.batches, policy=policy,
            publisher=self.publisher, recorder=self.recorder,
            checkpoint=partial(self.checkpoints.write, background=trainer.ranks > 1), evaluate=self._evaluate,
            credit=credit, before_publish=self._before_publish, promotion=self.promotion,
            roll_back=self._roll_back, requested=lambda: read_request(self.dir) is not None,
            step=start.step, stop=stop,
        )  # fmt: skip

    async def _open(self) -> None:
        """Check the engines, give them the current weights if others own them, and start the watchers."""
        # Unlike the run's own engines, these were not started with its weights.
        if self.settings.engine.urls:
            await self.publisher.update_all()
        if self.settings.policies:
            await self.publisher.publish_start()
        await self.publisher.samples.of_all(self.publisher.engines())
        if not self._by_clients and (urls := self.publisher.engines()):
            rate = await measure_rate(urls, episodes_at_a_time(self.settings))
            if rate:
                self.admission.pace.measured(rate)
                self.observer.note(forecast(self.settings, rate, sets=self.evaluator.sets))
        if self.promotion is not None and self.start.checkpoint is None:
            await self.checkpoints.write(0)  # to which the first version may be rolled back
        supervisor = self.supervisor
        supervisor.watch(self.engines.watch(), "engines")
        if self.settings.agent.source == "remote":
            set_connected = partial(self._set_serving, missing=NO_WORKER)
            supervisor.watch(watch_workers(self.gateway, set_connected), "workers")
        if self._by_clients:
            supervisor.watch(self.erasure.watch(), "erasure")
            supervisor.watch(self.clients.watch(self.gateway, self.writer), "clients")
        limit_s = self.settings.stall_timeout_s
        supervisor.watch(
            watchdog(limit_s, self._last_progress, lambda: self.status.describe(self.loop.step)), "watchdog"
        )
        supervisor.watch(every(STATE_S, lambda: self.observer.state(self.status.snapshot())), "state")
        supervisor.watch(every(STATE_S, self.pause.check), "outage")
        supervisor.watch(LoadLog(self.dir).watch(), "load")
        lifts = watch_lifts(self.dir, self.admission.failures.lift, self.ledger.durable, self.observer.note)
        supervisor.watch(lifts, "lifts")

    async def run(self) -> None:
        """Train, then cancel running groups, record the end, and commit."""
        try:
            await self._open()
            await self.supervisor.run(self._train())
        except BaseException as error:
            await run_to_completion(self._end_after(error))
            raise
        await run_to_completion(self._end())

    async def _train(self) -> None:
        if not self._by_clients:
            await self.evaluations.first()
        trainer, step = self.settings.trainer, self.loop.step
        done = self.stop.is_set() or step >= trainer.steps
        if not done and await asyncio.to_thread(reached, self.dir, trainer, step) is None:
            if not self._by_clients:
                self.supervisor.watch(self.rollout.run(), "rollout")
            await self.loop.run()

    async def _end_after(self, error: BaseException) -> None:
        """End a run that was cancelled or has failed; a further failure does not hide why it has."""
        try:
            await self._end(error)
        except Exception as failure:
            if isinstance(error, asyncio.CancelledError):
                raise
            self.observer.note(f"the end of the run has failed, too: {how_failed(failure, self.dir)[1]}")

    async def _end(self, error: BaseException | None = None) -> None:
        step = self.result.step = self.loop.step
        await self.evaluations.close()
        # Before the end is recorded: the audit refuses an end with groups still live.
        await self.rollout.stop()
        status, why = await self._how_ended(error)
        self._record_end(status, why)
        if self._by_clients and self.settings.gateway.url is None:  # else the gateway serves on
            with contextlib.suppress(GatewayError):  # it may be the gateway that failed
                text = f"{status} after step {step}" + (f", {why}" if why else "")
                await self.gateway.end_run(self.admission.epoch, text)
        await self.checkpoints.written()
        if self.loop.committable:
            try:
                await self.checkpoints.write(step)
                await self.publisher.files()
            except BaseException as failure:
                if status != "failed":
                    with contextlib.suppress(LedgerError):  # the failure itself is raised
                        self._record_end(*how_failed(failure, self.dir))
                raise
        else:
            self.observer.note(
                f"the weights are not those after step {step}, the last recorded one: no checkpoint is "
                "written, and --resume continues from the newest one"
            )
        if error is None:
            self.result.status, self.result.why = status, why

    def _record_end(self, status: str, why: str | None) -> None:
        step, version = self.loop.step, self.admission.version
        self.ledger.record(entry("run", "ended", step=step, version=version, status=status, why=why))

    async def _how_ended(self, error: BaseException | None) -> tuple[str, str | None]:
        """Return the run's status, and the reason if it failed, reached `trainer.until`, or has no more to
        learn."""
        if error is not None:
            return how_failed(error, self.dir)
        trainer, step = self.settings.trainer, self.loop.step
        why = self.loop.solved or await asyncio.to_thread(reached, self.dir, trainer, step)
        return "completed" if step >= trainer.steps or why else "interrupted", why

    def _background_evaluation(self) -> BackgroundEvaluation:
        settings, reserved = self.settings.eval, None
        if settings.engines:
            reserved = CandidateEngines(self.gateway, self.engines, self.publisher, settings.engines, 0.0)
        return BackgroundEvaluation(
            evaluate=self.evaluator.interim, publisher=self.publisher, engines=self.engines,
            reserved_engines=reserved, max_versions=settings.max_versions,
            note=self.observer.note,
        )  # fmt: skip

    async def _before_publish(self, version: int) -> None:
        await self.evaluations.before_publish(version)
        await self.gate.wait(version)

    async def _evaluate(self, step: int, last: bool) -> dict[str, float]:
        return {} if self._by_clients else await self.evaluations.after(step, last=last)

    def _promotion(self) -> Promotion:
        settings = self.settings.trainer.promotion
        engines = CandidateEngines(
            self.gateway, self.engines, self.publisher, settings.engines,
            settings.share if settings.mode == "canary" else 0.0,
        )  # fmt: skip
        checkpoint = self.start.checkpoint
        return Promotion(
            settings=settings, admission=self.admission, publisher=self.publisher, engines=engines,
            gateway=self.gateway, evaluate=self._held_out_rewards,
            restore=self._restore, note=self.observer.note, stop=self.stop,
            requested=self._decided, progress=partial(write_state, self.dir, settings.margin),
            live_step=0 if checkpoint is None else checkpoint.state.get("live_step", checkpoint.step),
        )  # fmt: skip

    async def _held_out_rewards(self, step: int, version: int | None) -> list[float]:
        return await unless_stopped(self.stop, self.evaluator.rewards(step, version)) or []

    def _decided(self) -> bool | None:
        """Return the operator's decision about the version in test; None without one."""
        request = read_request(self.dir)
        if request is None:
            return None
        if request.step is None:  # else the loop carries the rest of it out
            clear_request(self.dir)
        return request.action == "promote"

    async def _roll_back(self) -> None:
        """Return to the checkpoint that the operator requested, and publish its weights as a new version."""
        request, step, admission = read_request(self.dir), self.loop.step, self.admission
        if (writing := self.checkpoints.newest) is not None:
            await writing  # if it has failed, the run ends and keeps the request for a resume
        saved = checkpoints.committed(self.dir)
        if request is None or request.step not in saved:
            action = "roll-back" if request is None else request.action
            self.observer.note(f"the requested {action} does not apply any more; it is ignored")
            clear_request(self.dir)
            return
        checkpoint = await self._restore(request.step)
        # A checkpoint of this step has the weights that are rolled back, and would keep them.
        self.loop.committable = step not in saved
        why = f"requested by tidegate versions; the policy is that of step {request.step}"
        admission.roll_back(admission.version, checkpoint.state["version"], step, why)
        version = admission.versions.reserve(step)
        await self.publisher.publish(version)
        admission.mark_live(version)
        self.batches.on_freed()
        if self.promotion is not None:
            self.promotion.set_live(step)
        if step in saved:  # it has the weights that are rolled back
            await asyncio.to_thread(checkpoints.remove, saved[step])
        self.loop.committable = True
        await self.checkpoints.write(step)
        # Last: a trainer that is killed before finds the request again and repeats the roll-back.
        clear_request(self.dir)
        self.observer.note(f"rolled back to step {request.step}, whose policy is live as version {version}")

    async def _restore(self, step: int | None = None) -> Checkpoint:
        """Return the policy and its optimiser to a checkpoint, by default to that of the live version.

        A cancellation waits for the loading, and no checkpoint is written after it or after a failure.
        """
        if step is None:
            step = self.promotion.live_step if self.promotion is not None else None
        checkpoint = await self.checkpoints.read(step or 0)
        self.loop.committable = False
        await self.checkpoints.load(checkpoint)
        self.loop.committable = True
        return checkpoint

    def _on_poll(self, unserved: Collection[str], tokens_per_s: float) -> None:
        self.admission.pace.measured(tokens_per_s)
        self._set_serving(not unserved, policies=unserved)

    def _set_serving(self, serving: bool, missing: str = NO_ENGINE, policies: Collection[str] = ()) -> None:
        self.pause.set_serving(serving, missing, policies)
        self.rollout.wake()

    def _last_progress(self) -> float:
        # Both have limits of their own.
        if self.gate.waiting or (self.promotion is not None and self.promotion.active):
            return time.monotonic()
        return self.status.last_progress()
