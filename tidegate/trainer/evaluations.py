"""The evaluations of a run: when there is one, its metrics, and the best weights so far."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tidegate.config import Settings
from tidegate.errors import NoUsableEpisodesError
from tidegate.trainer.checkpoint.best import BestCheckpoint
from tidegate.trainer.end import RunResult
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.rollout.background_evaluation import BackgroundEvaluation, Evaluated
from tidegate.trainer.rollout.evaluator import Evaluator
from tidegate.trainer.waits import unless_stopped


@dataclass(slots=True, kw_only=True)
class RunEvaluations:
    """Runs the evaluations before the first step, after the last, and between them.

    Args:
        settings: Settings of the run.
        evaluator: Runs one evaluation.
        publisher: Has the live weights.
        beside: Runs evaluations during training; None: training waits for them.
        best: The best weights so far.
        stop_rollout: Ends the running groups, before the last evaluation.
        record: Writes a line of metrics for a step.
        note: Receives messages.
        stop: Set when the run is to end.
        result: Updated by each evaluation.
    """

    settings: Settings
    evaluator: Evaluator
    publisher: Publisher
    beside: BackgroundEvaluation | None
    best: BestCheckpoint
    stop_rollout: Callable[[], Awaitable[None]]
    record: Callable[[int, dict[str, float]], Awaitable[None]]
    note: Callable[[str], None]
    stop: asyncio.Event
    result: RunResult
    _newest: int = -1
    """The newest evaluated step."""

    async def first(self) -> None:
        """Evaluate before the first step, unless an earlier start of the run did."""
        if not self.settings.eval.first:
            return
        lines = await asyncio.to_thread(read_metrics, self.settings.run_dir)
        recorded = next((line for line in lines if line["step"] == 0), None)
        if recorded is not None:
            self.result.initial_eval = {
                key: value for key, value in recorded.items() if key.startswith("eval/")
            }
            return
        weights, version = await self.publisher.files()
        evaluation = await unless_stopped(self.stop, self.evaluator.full(0))
        if evaluation is None:
            return
        if not any(episode.reward is not None for _, _, episode in evaluation.episodes):
            reason, number = evaluation.reasons.most_common(1)[0]
            raise NoUsableEpisodesError(
                f"none of {evaluation.reasons.total()} held-out episodes succeeded; {number} of them failed "
                f"with: {reason}"
            )
        metrics = await self._ended(Evaluated(0, version, weights, evaluation))
        self.result.initial_eval = metrics
        await self.record(0, dict(metrics))

    async def after(self, step: int, *, last: bool) -> dict[str, float]:
        """Run the evaluation that is due after `step`, if any, and return its metrics.

        No publish happens during it. With `eval.beside_training`, one before the last step is only begun, and
        the metrics are those of the one that ended since; `eval/step` is the step that it evaluated.

        Args:
            step: Steps taken.
            last: Whether no step follows.
        """
        if last and not self.settings.eval.last and self._newest == step:
            return {}  # the step was followed by another evaluation
        earlier = {} if self.beside is None else await self._beside(self.beside, step, last)
        if self.beside is not None and not last:
            return earlier
        weights, version = await self.publisher.files()
        if last and self.settings.eval.last:
            # No step follows that would need the groups, and the engines are free for the evaluation.
            await self.stop_rollout()
            evaluation = await unless_stopped(self.stop, self.evaluator.full(step))
        else:
            evaluation = await unless_stopped(self.stop, self.evaluator.interim(step))
        if evaluation is None:
            return earlier
        return await self._ended(Evaluated(step, version, weights, evaluation))

    async def before_publish(self, version: int) -> None:
        """Wait while the publish would have an evaluation span too many versions."""
        if self.beside is not None:
            await unless_stopped(self.stop, self.beside.before_publish(version))

    async def close(self) -> None:
        if self.beside is not None:
            await self.beside.close()

    async def _beside(self, beside: BackgroundEvaluation, step: int, last: bool) -> dict[str, float]:
        """Collect the evaluation that ended since, and begin the one that is due after `step`."""
        due = self.evaluator.due(step)
        ended = await unless_stopped(self.stop, beside.collect(wait=last or due))
        metrics: dict[str, float] = {}
        if ended is not None:
            metrics = {**await self._ended(ended), "eval/step": float(ended.step)}
            if last and "eval/reward" in metrics:  # the line is that of the last evaluation
                self.note(f"held-out reward after step {ended.step}: {metrics['eval/reward']:.3f}")
        reached = self.settings.trainer.reached(metrics)
        if due and not (last or reached or self.stop.is_set()):
            await beside.start(step)
        return metrics

    async def _ended(self, ended: Evaluated) -> dict[str, float]:
        """Note failures, keep the weights if they score best, and return the metrics."""
        metrics, self._newest = ended.evaluation.metrics, ended.step
        for reason, number in ended.evaluation.reasons.most_common(3):
            self.note(f"evaluation: {number} episodes failed: {reason}")
        if "eval/reward" not in metrics:
            self.result.final_eval = self.result.final_eval | metrics
            return metrics
        reward, update = metrics["eval/reward"], self.best.update_if_better
        await asyncio.to_thread(update, ended.weights, ended.step, ended.version, reward)
        self.result.final_eval = metrics
        return metrics
