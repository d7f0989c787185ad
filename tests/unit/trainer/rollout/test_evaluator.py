"""Evaluations that reach `trainer.until`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tidegate.config import load_settings
from tidegate.gateway.client import GatewayClient
from tidegate.observer import Silent
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.evaluator import Evaluation, Evaluator
from tidegate.types import Task


class Scripted(Evaluator):
    """Its evaluations have the rewards of a script, by number of tasks."""

    script: dict[int, float]
    asked: list[list[tuple[str, str, int]]]

    async def _evaluate(self, step: int, plan: Sequence[Any], **_: bool) -> Evaluation:
        self.asked.append([(name, mode, len(tasks)) for name, mode, tasks in plan])
        return Evaluation({"eval/reward": self.script[len(plan[0][2])]}, [], Counter())


@pytest.mark.parametrize(
    ("until", "interim", "full", "found"),
    [("0.9", 0.89, 0.0, 0.89), ("0.9", 0.9, 0.91, 0.91), ("0.9", 1.0, 0.85, 0.85), (None, 1.0, 0.0, 1.0)],
)
async def test_an_interim_evaluation_that_reaches_the_target_is_confirmed_on_all_tasks(
    until: str | None, interim: float, full: float, found: float
) -> None:
    words = ["--model.path=m", "--eval.tasks=20", "--eval.interim_tasks=8"]
    settings = load_settings(None, words + ([] if until is None else [f"--trainer.until={until}"]))
    tasks = [Task(str(number), "e", ({"role": "user", "content": "?"},)) for number in range(30)]
    episodes = EpisodeSource(GatewayClient("http://127.0.0.1:9"), 1.0)
    evaluator = Scripted(settings, episodes, {"": tasks, "other": tasks}, Silent(), lambda *_: None)
    evaluator.script, evaluator.asked = {8: interim, 20: full}, []
    assert (await evaluator.interim(5)).metrics == {"eval/reward": found}
    whole = [("", "sampled", 20), ("other", "sampled", 20), ("", "greedy", 20)]
    confirmed = until is not None and interim >= 0.9
    assert evaluator.asked == [[("", "sampled", 8)], whole][: 1 + confirmed]
