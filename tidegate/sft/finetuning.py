"""One fine-tuning: trains the model step by step, measures the validation loss, and writes checkpoints.

It has a run's files: `config.toml`, `metrics.jsonl`, `checkpoints/`, and the result in `model/`. The batch of
a step depends on the data, the seed and the number of the step alone. A resumed fine-tuning therefore takes
the same steps again after its newest checkpoint, and ends with the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from tidegate import failpoints
from tidegate.config import Settings, TrainerSettings
from tidegate.devices import find_device
from tidegate.errors import ConfigError, NothingToDoError, StorageError, TrainingError
from tidegate.observer import Observer
from tidegate.settings import sections
from tidegate.settings.losses import NLLLoss
from tidegate.settings.teacher import TeacherSettings
from tidegate.sft.dataset import TuningData
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.distributed.ranks import RankProcesses
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.preflight import check_model
from tidegate.trainer.processes.rank_process import rank_processes
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.records.metrics import MetricsLog, read_metrics
from tidegate.trainer.start import Resume, base_model

KEPT = (
    "loss", "grad_norm", "learning_rate", "entropy", "tokens/trained", "tokens/computed", "padding_ratio",
    "time/update",
)  # fmt: skip
"""Metrics of a policy's update that say something about fine-tuning."""


def with_own_directory(settings: Settings) -> Settings:
    """Return the settings of a run with the directory of its fine-tuning, `<run.name>-sft`."""
    run = settings.run.model_copy(update={"name": f"{settings.run.name}-sft"})
    return settings.model_copy(update={"run": run})


def model_of(settings: Settings) -> Path:
    """Return the directory of its result."""
    return with_own_directory(settings).run_dir / "model"


class FineTuning:
    """A fine-tuning. `run()` is called once.

    Args:
        settings: Settings of the run that follows, with the section `[sft]`.
        observer: Shows progress.
        resume: Continue from the newest checkpoint; `auto`: if there is a fine-tuning.
        fresh: The directory may hold another fine-tuning, which is set aside before `prepare`.

    Attributes:
        stop: Set it to end the fine-tuning after the current step.

    Raises:
        TidegateError: The data or the directory cannot be used. Nothing is written yet.
    """

    def __init__(
        self, settings: Settings, observer: Observer, *, resume: Resume = False, fresh: bool = False
    ) -> None:
        self.settings, self.observer = settings, observer
        self.dir = with_own_directory(settings).run_dir.absolute()
        self.stop = asyncio.Event()
        find_device("trainer.device", settings.trainer.device)
        if not fresh:
            self._check_directory(resume)
        self.checkpoint = checkpoints.latest(self.dir) if resume else None
        if resume:
            check_model(
                self.dir, settings.model.path, None if self.checkpoint is None else self.checkpoint.path
            )
        self.dataset = TuningData.load(settings)
        self._digest = self.dataset.digest
        epochs = settings.sft.epochs * self.dataset.steps_per_epoch
        self.steps = settings.sft.steps or epochs
        self._check_checkpoint()

    @property
    def step(self) -> int:
        """The step after which it starts."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def is_complete(self) -> bool:
        """Whether all steps are taken and the result is written."""
        return self.step >= self.steps and (self.dir / "model" / "config.json").is_file()

    def _check_directory(self, resume: Resume) -> None:
        if (self.dir / "ledger.jsonl").exists():
            raise ConfigError(f"{self.dir} holds a run of tidegate train: choose another run.name")
        used = (self.dir / "config.toml").exists()
        if used and not resume:
            raise ConfigError(
                f"{self.dir} holds a fine-tuning already: continue it (--resume), choose another run.name, "
                "or set it aside (--fresh)"
            )
        if resume is True and not used:
            raise ConfigError(f"{self.dir} holds no fine-tuning to resume; leave --resume out to start one")

    def _check_checkpoint(self) -> None:
        """Raises ConfigError or CheckpointError if the checkpoint is damaged, or of other data."""
        if self.checkpoint is None:
            return
        self.checkpoint.verify()
        if self.checkpoint.state["data"] != self._digest:
            raise ConfigError(
                f"the data in sft.episodes and sft.chats, or its selection, differs from that of {self.dir}: "
                "restore it, or start anew (--fresh)"
            )
        if self.step > self.steps:
            raise ConfigError(
                f"{self.dir} has taken {self.step} steps already, more than the {self.steps} that are set: "
                "raise sft.epochs or sft.steps"
            )

    async def run(self) -> bool:
        """Take the remaining steps and write the result; returns False if `stop` was set before the last.

        `prepare` is called before.

        Raises:
            TidegateError: A step was not finite, a rank was lost, or a file cannot be written.
        """
        trainer = trainer_settings(self.settings, self.steps)
        try:
            async with contextlib.AsyncExitStack() as stack:
                supervisor = TaskSupervisor()
                ranks = RankProcesses(trainer, rank_processes(trainer.ranks, self.dir / "logs"))
                stack.push_async_callback(ranks.close)
                stack.push_async_callback(supervisor.close)
                start = self.settings.model.path if self.checkpoint is None else self.checkpoint.path
                base = base_model(self.settings, start.absolute())
                policy = await ranks.open(base, self.settings.run.seed, supervisor.watch)
                return await supervisor.run(self._train(policy))
        except OSError as error:
            raise StorageError(f"{self.dir} cannot be written: {error.strerror or error}") from error

    def prepare(self) -> None:
        """Create the directory; lines of steps after the checkpoint are removed from the metrics."""
        for name in ("logs", "checkpoints"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o700)
        part = self.dir / ".config.toml.partial"
        part.write_text(sections.dump(self.settings), encoding="utf-8")
        with failpoints.around("config"):
            part.replace(self.dir / "config.toml")
        if self.step < self.steps:  # an older result, which must not be taken for the complete one
            shutil.rmtree(self.dir / "model", ignore_errors=True)
        with MetricsLog(self.dir) as log:
            log.truncate_after(self.step)
        resumed_from = None if self.checkpoint is None else self.step
        self.observer.started({"dir": str(self.dir), "steps": self.steps, "resumed_from": resumed_from})

    async def _train(self, policy: Policy) -> bool:
        """Take the steps; each blocking call runs in a thread."""
        if self.checkpoint is not None:
            await asyncio.to_thread(checkpoints.load, self.checkpoint, policy)
        with MetricsLog(self.dir) as log:
            if all("eval/reward" in line for line in read_metrics(self.dir)):
                self._record(log, 0, await self._validation(policy, 0))
            step = self.step
            while step < self.steps and not self.stop.is_set():
                step += 1
                await self._step(policy, step, log)
                if step % self.settings.trainer.checkpoint_every == 0:
                    await self._save(policy, step)
        await self._save(policy, step)
        if step < self.steps:
            return False
        with failpoints.around("sft.model"):
            await asyncio.to_thread(policy.save_weights, self.dir / "model", durable=True)
        return True

    async def _step(self, policy: Policy, step: int, log: MetricsLog) -> None:
        began = time.perf_counter()
        rows = self.dataset.batch(step)
        update = await asyncio.to_thread(policy.update, rows, 0)
        if update["skipped"]:
            raise TrainingError(
                f"step {step} has no finite loss or gradient, because of {'; '.join(policy.non_finite[:3])}: "
                "remove this data and start anew (--fresh), or lower sft.learning_rate (--resume)"
            )
        metrics = {name: update[name] for name in KEPT} | await self._validation(policy, step)
        self._record(log, step, {**metrics, "time/step": time.perf_counter() - began})

    async def _validation(self, policy: Policy, step: int) -> dict[str, float]:
        """Return the validation loss, if it is due after this step."""
        every = self.settings.eval.every
        due = step in (0, self.steps) or (every and step % every == 0)
        if not (due and self.dataset.validation):
            return {}
        return {"validation/loss": await asyncio.to_thread(policy.validation_loss, self.dataset.validation)}

    def _record(self, log: MetricsLog, step: int, metrics: dict[str, float]) -> None:
        line = {
            "step": step, "version": 0, "time": time.time(), "sft/steps": self.steps,
            "sft/epoch": step / self.dataset.steps_per_epoch, **metrics,
        }  # fmt: skip
        log.append(line)
        self.observer.step(line)

    async def _save(self, policy: Policy, step: int) -> None:
        state: dict[str, Any] = {"data": self._digest}
        await asyncio.to_thread(checkpoints.save, self.dir, step, policy, state)
        checkpoints.prune(self.dir, self.settings.trainer.keep_checkpoints)

    def nothing_to_do(self) -> NothingToDoError:
        """Return the error of a start that would train nothing."""
        return NothingToDoError(
            f"the fine-tuning in {self.dir} has taken all its {self.steps} steps; its result is "
            f"{self.dir / 'model'}. To continue, raise sft.epochs or sft.steps"
        )

    def evaluated(self, step: int) -> bool:
        """Whether the held-out reward after a step is recorded."""
        return any(line["step"] == step and "eval/reward" in line for line in read_metrics(self.dir))

    def record_evaluation(self, step: int, rewards: dict[str, float]) -> None:
        """Append a line with the held-out reward after a step."""
        with MetricsLog(self.dir) as log:
            self._record(log, step, rewards)


def trainer_settings(settings: Settings, steps: int) -> TrainerSettings:
    """Return the `[trainer]` settings with what `[sft]` replaces."""
    sft = settings.sft
    return settings.trainer.model_copy(
        update={
            "loss": NLLLoss(),
            "teacher": TeacherSettings(),
            "steps": steps,
            "learning_rate": sft.learning_rate,
            "schedule": sft.schedule,
            "warmup_steps": sft.warmup_steps,
            "beta1": 0.9,  # no gradient is old
            "minibatches": 1,
            "streaming": False,
            "ess_scaling": False,
            "reference_model": None,
            "kl_coef": 0.0,
            "routing_replay": False,
        }
    )
