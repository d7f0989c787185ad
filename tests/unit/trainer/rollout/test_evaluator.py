"""Evaluations that reach `trainer.until`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tidegate.config import load_settings
from tidegate.errors import ConfigError
from tidegate.gateway.client import GatewayClient
from tidegate.observer import Silent
from tidegate.settings import sections
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.evaluator import Evaluation, Evaluator
from tidegate.types import Outcome, Task, Trajectory


async def unsaved(*_: object) -> None: ...


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
    words = ["--model.path=m", "--eval.tasks=20", "--eval.interim_tasks=8", "--eval.every=5"]
    settings = load_settings(None, words + ([] if until is None else [f"--trainer.until={until}"]))
    tasks = [Task(str(number), "e", ({"role": "user", "content": "?"},)) for number in range(30)]
    episodes = EpisodeSource(GatewayClient("http://127.0.0.1:9"), 1.0)
    evaluator = Scripted(
        settings=settings,
        episodes=episodes,
        sets={"": tasks, "other": tasks},
        observer=Silent(),
        save=unsaved,
    )
    evaluator.script, evaluator.asked = {8: interim, 20: full}, []
    evaluation = await evaluator.interim(5)
    assert evaluation is not None
    assert evaluation.metrics == {"eval/reward": found}
    whole = [("", "sampled", 20), ("other", "sampled", 20), ("", "greedy", 20)]
    confirmed = until is not None and interim >= 0.9
    assert evaluator.asked == [[("", "sampled", 8)], whole][: 1 + confirmed]


SUITES = ["--eval.suites.hard.set=other", "--eval.suites.hard.tasks=3", "--eval.suites.hard.every=2",
          "--eval.suites.certain.greedy=true", "--eval.suites.certain.tasks=4"]  # fmt: skip


class Solved(Evaluator):
    """Every third episode fails; the others have the number of their task as reward. No gateway is called."""

    async def _attempt(self, name: str, mode: str, task: Task, candidate: bool) -> Trajectory:
        number = int(task.id)
        reward = None if number % 3 == 2 else float(number)
        outcome = Outcome.AGENT_ERROR if reward is None else Outcome.COMPLETED
        return Trajectory(name, task.id, "e", "eval", outcome, [], reward=reward)


def solved(*words: str, saved: list[Any] | None = None) -> Solved:
    settings = load_settings(None, ["--model.path=m", "--eval.tasks=2", "--eval.interim_tasks=1", *words])
    tasks = [Task(str(number), "e", ({"role": "user", "content": "?"},)) for number in range(9)]
    episodes = EpisodeSource(GatewayClient("http://127.0.0.1:9"), 1.0)

    async def keep(step: int, done: list[Any]) -> None:
        if saved is not None:
            saved.extend(done)

    return Solved(
        settings=settings,
        episodes=episodes,
        sets={"": tasks, "other": tasks[1:]},
        observer=Silent(),
        save=keep,
    )


async def test_suites_have_their_own_sets_sizes_intervals_and_metrics() -> None:
    saved: list[Any] = []
    evaluator = solved("--eval.every=3", *SUITES, saved=saved)
    assert await evaluator.interim(1) is None
    second = await evaluator.interim(2)
    assert second is not None
    seconds = second.metrics.pop("eval/seconds")
    assert second.metrics == {"eval/hard/reward": 2.0, "eval/hard/episodes": 2.0, "eval/hard/failed": 1.0}
    assert seconds >= 0
    assert [(name, mode) for name, mode, _ in saved] == [("suite/hard", "sampled")] * 3
    third = await evaluator.interim(3)
    assert third is not None
    assert third.metrics.keys() == {"eval/reward", "eval/episodes", "eval/failed", "eval/seconds"}
    sixth = await evaluator.interim(6)
    assert sixth is not None
    assert {"eval/reward", "eval/hard/reward"} <= sixth.metrics.keys()
    whole = (await evaluator.full(9)).metrics
    assert (whole["eval/certain/reward"], whole["eval/certain/failed"]) == (4 / 3, 1.0)
    assert (whole["eval/reward"], whole["eval/reward_greedy"], whole["eval/reward_other"]) == (0.5, 0.5, 1.0)
    assert whole["eval/failed"] == 1.0, "of the sets, without the suites"


async def test_a_target_that_is_reached_is_confirmed_with_the_suites_of_the_step() -> None:
    evaluator = solved("--eval.every=2", "--trainer.until=0", *SUITES)
    found = await evaluator.interim(2)
    assert found is not None
    assert {"eval/reward_greedy", "eval/hard/reward"} <= found.metrics.keys()
    assert "eval/certain/reward" not in found.metrics


def test_a_suite_of_no_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.suites\.hard\.set = 'new' is not a .* has '', 'other'"):
        solved("--eval.suites.hard.set=new")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--eval.suites.a/b.every=1"], "eval.suites.a/b"),
        (["--eval.suites.hard.size=1"], "there is no setting 'eval.suites.hard.size'"),
        (["--eval.first=false", "--eval.last=false", "--eval.suites.hard.tasks=1"], "is never evaluated"),
    ],
)
def test_what_is_no_suite(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_settings(None, ["--model.path=m", *words])


def test_suites_are_saved_with_the_settings(tmp_path: Path) -> None:
    settings = load_settings(None, ["--model.path=m", *SUITES])
    (tmp_path / "config.toml").write_text(sections.dump(settings))
    assert load_settings(tmp_path / "config.toml") == settings
