"""The metrics of a batch; docs/metrics.md explains every key (for a real run: e2e/test_train)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.documented import documented, unexplained
from tests.unit.trainer.learning_fixtures import make_model, make_rows, make_trajectory, make_turn
from tests.unit.trainer.publish.test_promotion import World
from tidegate.config import Settings, TrainerSettings
from tidegate.errors import ConfigError
from tidegate.gateway.client import GatewayClient
from tidegate.observer import Silent
from tidegate.settings.teacher import TeacherSettings
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State, failure_cause
from tidegate.trainer.ledger.token_counts import TokenCounts
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.records.judge import JudgeRecord
from tidegate.trainer.records.metrics import MetricsLog, read_metrics
from tidegate.trainer.records.recorder import Recorder, age_metrics, custom_metrics
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.evaluator import SUITE, Evaluator, _metrics
from tidegate.trainer.teacher.client import ScoreClient
from tidegate.trainer.teacher.teacher import Teacher
from tidegate.types import Group, Task, ToolCall, Trajectory


def recorder(directory: Path, versions: list[int]) -> Recorder:
    """One that takes the version of each line from `versions`."""
    log, files = MetricsLog(directory), TrajectoryFiles(directory)
    return Recorder(log, files, Silent(), dict, lambda: versions.pop(0))


def episode(
    *, calls: int = 0, parse: str | None = None, env: str = "test", reward: float = 1.0
) -> Trajectory:
    found = make_trajectory([make_turn(0, None, [1, 2], [3, 4, 5], version=1)])
    found.turns[0].parse = parse
    found.env, found.reward, found.metrics = env, reward, {"told": 1.0}
    found.reward_parts = {"exact": reward}
    found.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{}] * calls}]
    return found


def batch(*episodes: Trajectory, version: int = 1, staleness: int = 0) -> Batch:
    group = Group("g1", "t1", list(episodes))
    return Batch(version, [staleness], [group], [], 0.0, 0.0)


async def test_staleness_is_recorded_in_optimiser_steps_too(tmp_path: Path) -> None:
    """Versions 0, 1, 2 are published after steps 0, 2, 4; the batch of step 6 holds a token of version 1."""
    log = recorder(tmp_path, [0, 0, 1, 1, 2, 2])
    for step in range(6):
        await log.step(step, {})
    found = log.batch_metrics(batch(episode(), version=2, staleness=1), 6)
    assert (found["staleness/max"], found["staleness_steps/max"]) == (1, 3)
    assert log.batch_metrics(batch(episode(), version=2), 6)["staleness_steps/mean"] == 1
    assert [line["version"] for line in read_metrics(tmp_path)] == [0, 0, 1, 1, 2, 2]


def test_each_part_of_the_reward_is_a_metric(tmp_path: Path) -> None:
    """What an agent posts under the name of another metric does not replace that one."""
    one, other = episode(reward=1.0), episode(reward=0.0)
    one.reward_parts, other.reward_parts = {"exact": 1.0, "form": 0.5}, {"exact": 0.0, "mean": 7.0}
    found = recorder(tmp_path, []).batch_metrics(batch(one, other), 1)
    assert (found["reward/exact"], found["reward/form"], found["reward/mean"]) == (0.5, 0.5, 0.5)


def test_a_held_out_set_whose_score_is_another_ones_is_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate({"model": {"path": "m"}})
    episodes = EpisodeSource(GatewayClient("http://127.0.0.1:9"), 1.0)
    with pytest.raises(ConfigError, match=r"'greedy'.*eval/reward_greedy"):
        Evaluator(
            settings=settings,
            episodes=episodes,
            sets={"": [], "greedy": []},
            observer=Silent(),
            save=cast(Any, None),
        )


def test_steps_before_a_resume_are_not_guessed(tmp_path: Path) -> None:
    """The first batch after a resume at step 10, whose weights went live as version 7."""
    log = recorder(tmp_path, [])
    found = log.batch_metrics(batch(episode(), version=7, staleness=2), 11)
    assert "staleness_steps/mean" not in found
    assert log.batch_metrics(batch(episode(), version=7), 11)["staleness_steps/mean"] == 0


async def test_each_line_says_how_many_groups_were_lost_since_the_one_before(tmp_path: Path) -> None:
    told = [{"groups/stale": float(stale), "groups/failed": 1.0} for stale in (5, 7, 7)]
    log = Recorder(MetricsLog(tmp_path), TrajectoryFiles(tmp_path), Silent(), lambda: told.pop(0), lambda: 0)
    for step in (1, 2):
        await log.step(step, {})
    lines = read_metrics(tmp_path)
    assert [line["selection/stale_groups"] for line in lines] == [2, 0]
    assert [line["selection/failed_groups"] for line in lines] == [0, 0]


def test_tool_calls_are_those_of_the_recorded_messages(tmp_path: Path) -> None:
    told = [episode(calls=3, parse="ok"), episode(calls=1, parse="malformed"), episode(), episode()]
    found = recorder(tmp_path, []).batch_metrics(batch(*told), 1)
    assert (found["tool_calls/mean"], found["tool_calls/max"]) == (1, 3)
    assert found["tool_calls/malformed_ratio"] == 0.5


def test_calls_of_the_environments_tools_are_counted_by_tool(tmp_path: Path) -> None:
    told, other = episode(), episode()
    told.tool_calls = [
        ToolCall("enter", {"digit": 4}, "closed", False, 0, 1.0, 0.5),
        ToolCall("enter", {"digit": 11}, "11 is not a digit", True, 0, 2.0, 0.25),
        ToolCall("made_up", {}, "there is no tool 'made_up'", True, 0, 3.0, 0.25, known=False),
    ]
    found = recorder(tmp_path, []).batch_metrics(batch(told, other), 1)
    assert {name: value for name, value in found.items() if name.startswith("tools/")} == {
        "tools/enter_calls": 2, "tools/enter_errors": 1, "tools/unknown_calls": 1, "tools/unknown_errors": 1,
    }  # fmt: skip
    assert found["time/tool"] == 0.5
    assert "time/tool" not in recorder(tmp_path, []).batch_metrics(batch(other), 1)


def test_the_share_of_time_outside_the_model_counts_parallel_requests_once(tmp_path: Path) -> None:
    """Requests at the model from second 1 to 4 (two of them overlap) and 6 to 7, of 10 seconds."""
    turns = [make_turn(number, None, [1, 2], [3, 4], version=1) for number in range(3)]
    for turn, times in zip(turns, ((6.0, 1.0), (1.0, 2.0), (2.0, 2.0)), strict=True):
        turn.started, turn.seconds = times
    told = make_trajectory(turns)
    told.seconds = 10.0
    found = recorder(tmp_path, []).batch_metrics(batch(told), 1)
    assert found["time/outside_model/mean"] == pytest.approx(0.6)


def test_what_was_dropped_is_compared_with_what_was_trained_on(tmp_path: Path) -> None:
    """Trained: 3 tokens each, rewards 1 and 0.5. Dropped: 3 tokens with reward 0, and one that has none."""
    some = batch(episode(), episode(reward=0.5))
    found = recorder(tmp_path, []).batch_metrics(some, 1)
    assert found["selection/dropped_ratio"] == 0
    assert "selection/dropped_reward" not in found
    long = make_trajectory([make_turn(0, None, [1], [2] * 9, version=1)])
    long.reward = None
    some.dropped += [
        (Group("g2", "t2", [episode(reward=0.0)]), State.FILTERED), (Group("g3", "t3", [long]), State.STALE),
    ]  # fmt: skip
    found = recorder(tmp_path, []).batch_metrics(some, 1)
    assert {name: value for name, value in found.items() if name.startswith("selection/")} == {
        "selection/dropped_ratio": 0.5,
        "selection/trained_length": 3, "selection/trained_reward": 0.75,
        "selection/dropped_length": 6, "selection/dropped_reward": 0.0,
    }  # fmt: skip


def test_what_failed_or_went_stale_unfinished_is_compared_in_length() -> None:
    tokens = TokenCounts()
    assert not [name for name in tokens.metrics() if name.startswith("selection/")]
    for number, cause, episodes in [(30, State.FAILED, 1), (10, State.FAILED, 1), (64, State.STALE, 8)]:
        tokens.record_wasted(number, cause, episodes)
    told = tokens.metrics()
    assert (told["selection/failed_length"], told["selection/stale_length"]) == (20, 8)


ELSEWHERE = {
    "eval/step", "sft/epoch", "sft/steps", "validation/loss", "unlisted_mass", "centered_fraction",
}  # fmt: skip
"""Made by tests/unit/trainer/rollout/test_background_evaluation.py, tests/unit/sft and
tests/unit/trainer/policy/test_diagnostics.py."""


async def test_keys_that_are_there_only_sometimes_are_documented_and_made(tmp_path: Path) -> None:
    made = {
        *_of_a_mixed_batch(tmp_path / "run"),
        *_of_a_step_with_a_reference(tmp_path),
        *_of_an_evaluation(),
        *_of_what_was_lost(),
        *_of_failures(),
        *_of_a_judge(),
        *_of_a_teacher(tmp_path / "distilled"),
        *await World(mode="evaluated").promotion.publish(1),
    }
    assert unexplained(made) == set()
    always = {"line", "step", "steps that publish", "eval"}
    sometimes = {key for key, when in documented().items() if when not in always}
    examples = {
        key.replace("<env>", "b")
        .replace("<set>", "hard")
        .replace("<suite>", "hard")
        .replace("<cause>", "timeout")
        .replace("<name>", "told")
        .replace("<criterion>", "brief")
        .replace("<part>", "exact")
        .replace("<policy>", "solver")
        .replace("<metric>", "reward")
        for key in sometimes
    }
    assert examples - ELSEWHERE <= made


def _of_a_judge() -> dict[str, float]:
    record, episodes = JudgeRecord(), [episode(reward=float(n % 2)) for n in range(100)]
    for judged in episodes:
        judged.reward_parts = {"judge": 0.5, "judge_brief": 0.5}
        judged.metrics = {"judge/environment": judged.reward or 0.0, "judge/seconds": 1.0}
    record.add(episodes)
    return record.metrics() | custom_metrics(episodes)


def _of_a_mixed_batch(directory: Path) -> dict[str, float]:
    mixed = batch(episode(env="a"), episode(env="b"))
    mixed.groups[0].trajectories[0].tool_calls = [ToolCall("told", {}, "", False)]
    mixed.groups[0].trajectories[0].turns[0].policy = "solver"
    long = make_trajectory([make_turn(0, None, [1], [3, 4, 5, 6], version=1)])
    mixed.dropped.append((Group("g2", "t2", [episode(reward=0.0), long]), State.FILTERED))
    return recorder(directory, []).batch_metrics(mixed, 1)


def _of_a_step_with_a_reference(directory: Path) -> dict[str, float]:
    base = make_model(directory / "base")
    return Policy.load(base, TrainerSettings(reference_model=base)).update(make_rows(4), 3)


def _of_what_was_lost() -> dict[str, float]:
    tokens = TokenCounts()
    tokens.record_wasted(1, State.STALE, 1)
    tokens.record_wasted(1, State.FAILED, 1)
    lost = {name: value for name, value in tokens.metrics().items() if name.startswith("selection/")}
    ages = age_metrics({3: 1, 6: 2})
    assert ages == {"staleness_dropped/mean": 5.0, "staleness_dropped/max": 6.0}
    return {**lost, **ages}


def _of_failures() -> dict[str, float]:
    outcomes = ("agent_error", "reward_error", "timeout", "infra_error", "cancelled")
    causes = [failure_cause(outcome, spared=spared) for outcome in outcomes for spared in (False, True)]
    causes += [failure_cause("timeout", spared=False, slow=True)]
    return {f"failures/{cause}": 1.0 for cause in causes}


def _of_a_teacher(directory: Path) -> dict[str, float]:
    scored = batch(episode(env="a"), episode(env="b"))
    for trajectory, value in zip(scored.groups[0].trajectories, (-1.0, -3.0), strict=True):
        for turn in trajectory.turns:
            turn.logprobs = np.full(len(turn.output_ids), -0.5, np.float32)
            turn.teacher_logprobs = np.full(len(turn.output_ids), value, np.float32)
    scored.scored_s = 1.5
    found = recorder(directory, []).batch_metrics(scored, 1)
    assert {name: found[name] for name in found if "teacher" in name} == {
        "time/teacher": 1.5, "teacher/kl": 1.5, "teacher/logprob": -2.0,
        "teacher/kl_a": 0.5, "teacher/kl_b": 2.5,
    }  # fmt: skip
    teacher = Teacher(
        settings=TeacherSettings(),
        urls={},
        client=ScoreClient(1.0),
        watch=cast(Any, None),
        note=print,
        limit_s=1.0,
    )
    return {**{name: value for name, value in found.items() if "teacher" in name}, **teacher.metrics()}


def _of_an_evaluation() -> dict[str, float]:
    tasks = [Task("t1", "test", [])]
    told = episode()
    told.metrics, told.turns[0].policy = {"told": 1.0}, "solver"
    names = [("", "sampled"), ("", "greedy"), ("hard", "sampled"), (f"{SUITE}hard", "sampled")]
    plan = [(name, mode, tasks) for name, mode in names]
    return _metrics(plan, [(name, mode, told) for name, mode, _ in plan])


@pytest.mark.parametrize("key", ["reward/mean/x", "loss2", "eval/other", ""])
def test_a_key_without_an_explanation_is_found(key: str) -> None:
    assert unexplained([key]) == {key}
