"""The checks of rewards find planted faults."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from tests.unit.doctor.common import Sound, codes
from tidegate.doctor import rewards as grading
from tidegate.doctor.findings import Finding, Level
from tidegate.doctor.rewards import check_rewards
from tidegate.envs.rewards import Reward
from tidegate.types import Task


def graded_by(fn: Any) -> list[Finding]:
    class Graded(Sound):
        rewards = (Reward("mine", fn),)

    return check_rewards(Graded())


def raises(output: str, answer: str) -> float:
    return 1 / 0 if output == answer else 0.0


@pytest.mark.parametrize(
    ("fn", "code", "text"),
    [
        (raises, "reward_raised", "'mine' raised ZeroDivisionError: division by zero"),
        (lambda output: int(output), "reward_raised", "on the output '#### 2' of task t0"),
        (lambda output: math.nan, "reward_not_finite", "returned is nan, not a finite number"),
        (lambda output: None, "reward_not_finite", "returned is None, not a finite number"),
        (lambda output: 0.5, "reward_constant", "gold and wrong answers all earn 0.5"),
        (lambda output, answer: output != answer, "gold_no_better", "gold answers score no higher"),
        (lambda output: "####" in output, "gold_no_better", "gold answers 1, best wrong answers 1 (8"),
        (
            lambda output, answer, task: output == answer and task.id != "t3",
            "gold_sometimes_no_better",
            "on 1 of 8 tasks, such as t3",
        ),
    ],
)  # fmt: skip
def test_a_reward_with_a_fault(fn: Any, code: str, text: str) -> None:
    (found,) = graded_by(fn)
    assert found.code == code
    assert text in found.text


def test_a_reward_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(grading, "SCORE_S", 0.05)
    (found,) = graded_by(lambda output: float(ended.wait(20)))
    ended.set()
    assert found.code == "reward_hung"


def test_a_reward_may_ask_for_everything() -> None:
    def asks(output: str, answer: str, messages: Any, trajectory: Any, task: Any, info: Any) -> float:
        assert messages[-1] == {"role": "assistant", "content": output}
        assert trajectory.task_id == task.id
        return float(output == answer)

    assert codes(graded_by(asks)) == []


def test_tasks_without_answers_still_have_their_rewards_tried() -> None:
    class Open(Sound):
        rewards = (Reward("mine", lambda output: len(output) / 0),)

        def task(self, id: str, number: int) -> Task:
            return Task(id, "sound", [{"role": "user", "content": "Write."}])

    assert codes(check_rewards(Open())) == ["reward_raised"]


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (lambda trajectory: -float(len(trajectory.turns)), "reward_constant"),
        (lambda trajectory, output: float(output == ""), "gold_no_better"),
    ],
)
def test_a_reward_of_trajectories_cannot_be_judged_without_one(fn: Any, code: str) -> None:
    (found,) = graded_by(fn)
    assert (found.code, found.level) == (code, Level.WARNING)


@pytest.mark.parametrize("gold", [LookupError("none"), 12])
def test_gold_that_is_no_output(gold: Any) -> None:
    class Odd(Sound):
        def gold_output(self, task: Task) -> Any:
            if isinstance(gold, Exception):
                raise gold
            return gold

    assert codes(check_rewards(Odd())) == ["gold_raised"]


def test_an_environment_may_leave_rewards_to_the_agent() -> None:
    class Bare(Sound):
        rewards = ()

    assert codes(check_rewards(Bare())) == ["agent_rewards"]
