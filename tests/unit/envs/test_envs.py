"""The arithmetic environment, and loading of environments."""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.agents.calculator import calculate
from tidegate.envs.arithmetic import TEMPLATES, UNSEEN_TEMPLATES, Arithmetic, draw_problem, evaluate
from tidegate.envs.base import Environment, load_environment
from tidegate.envs.rewards import Reward, final_number
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Task, Trajectory


def questions(tasks: list[Task]) -> set[str]:
    return {task.messages[0]["content"] for task in tasks}


def test_no_problem_is_in_two_splits() -> None:
    environment = Arithmetic()
    train = questions([environment.train_task(index) for index in range(5000)])
    sets = environment.eval_sets()
    assert list(sets) == ["", "unseen_templates"]
    held_out, unseen = (questions(list(tasks)) for tasks in sets.values())
    assert len(held_out) == len(unseen) == 500
    assert not train & held_out
    assert not train & unseen
    assert not held_out & unseen


def test_held_out_problems_are_what_training_would_else_have_drawn() -> None:
    """The split is by hash: a held-out problem that training draws is passed over, not answered."""
    drawn = [draw_problem(Random(index)) for index in range(3000)]
    share = sum(problem.held_out for problem in drawn) / len(drawn)
    assert 0.04 < share < 0.09
    assert all(
        task.info["template"] in {one.name for one in TEMPLATES} for task in Arithmetic().eval_sets()[""]
    )


def test_unseen_templates_are_others() -> None:
    assert len(TEMPLATES) >= 12
    assert len(UNSEEN_TEMPLATES) >= 4
    trained = {template.name for template in TEMPLATES}
    unseen = {task.info["template"] for task in Arithmetic().eval_sets()["unseen_templates"]}
    assert unseen == {template.name for template in UNSEEN_TEMPLATES}
    assert not unseen & trained
    assert not {one.text for one in TEMPLATES} & {one.text for one in UNSEEN_TEMPLATES}


@given(index=st.integers(min_value=0, max_value=10**12), seed=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_an_index_always_gives_the_same_task(index: int, seed: int) -> None:
    assert Arithmetic(seed).train_task(index) == Arithmetic(seed).train_task(index)
    assert Arithmetic(seed).train_task(index) != Arithmetic(seed + 1).train_task(index)


def test_training_covers_every_template() -> None:
    environment = Arithmetic()
    seen = {environment.train_task(index).info["template"] for index in range(400)}
    assert seen == {template.name for template in TEMPLATES}


@pytest.mark.parametrize("template", TEMPLATES + UNSEEN_TEMPLATES, ids=lambda one: one.name)
def test_problems_come_out_right(template) -> None:
    rng = Random(1)
    for _ in range(200):
        problem = draw_problem(rng, [template])
        assert calculate(problem.expression) == problem.answer.split("#### ")[1]
        assert all(str(number) in problem.question for number in problem.numbers.values())
        assert set(problem.numbers) == {sign for sign in template.expression if sign.isalpha()}
        for value in intermediate_values(template.expression, problem.numbers):
            assert value > 0, problem
            assert value.denominator == 1, problem


def intermediate_values(expression: str, numbers: dict[str, int]) -> list[Fraction]:
    """The values of an expression's every part."""
    parts = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.BinOp)]
    return [evaluate(ast.unparse(part), numbers) for part in parts]


def test_the_gold_answer_is_worth_one_and_another_nothing() -> None:
    environment = Arithmetic(held_out=50)
    for task in environment.eval_sets()[""]:
        assert environment.score(task, None, task.answer, []).reward == 1.0
        wrong = f"{task.answer}\n#### {final_number(task.answer) + 1}"
        assert environment.score(task, None, wrong, []).reward == 0.0
        assert environment.score(task, None, None, []).reward == 0.0


def test_scores_are_weighted_and_kept_apart() -> None:
    class Two(Arithmetic):
        rewards = (
            Reward("length", lambda output: len(output), 0.5),
            Reward("turns", lambda messages, task: len(messages) if task.id else 0, 2),
        )

    scored = Two().score(Two().train_task(0), None, "four", [{"role": "user"}])
    assert scored.parts == {"length": 4.0, "turns": 1.0}
    assert scored.reward == 4.0
    assert Two().names == ["length", "turns"]


def test_a_raising_reward_is_named() -> None:
    class Broken(Arithmetic):
        rewards = (Reward("broken", lambda output: 1 / 0),)

    with pytest.raises(RewardError, match="'broken' raised ZeroDivisionError"):
        Broken().score(Broken().train_task(0), None, "x", [])


def test_a_built_in_environment_takes_options() -> None:
    environment = load_environment("arithmetic", {"held_out": 3})
    assert [len(tasks) for tasks in environment.eval_sets().values()] == [3, 3]


OWN = """
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task

class Own(Environment):
    name = "own"
    def __init__(self, size=1): self.size = size
    def train_task(self, index): return Task(str(index), self.name, [])
    def eval_sets(self): return {"": []}

class Twice(Own):
    rewards = (Reward("a", lambda: 1), Reward("a", lambda: 2))

ready = Own(7)
number = 3
"""


def test_an_own_environment_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert load_environment(f"{file}:Own", {"size": 5}).size == 5
    assert load_environment(f"{file}:ready", {}).size == 7
    assert isinstance(load_environment(f"{file}:Own", {}), Environment)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("aritmetic", {}, "no environment 'aritmetic'; did you mean 'arithmetic'"),
        ("FILE:Oen", {}, "has no environment 'Oen'; did you mean 'Own'"),
        ("FILE:Own", {"sise": 5}, "no option 'sise'; did you mean 'size'"),
        ("FILE:ready", {"size": 5}, "not an environment class"),
        ("FILE:number", {}, "is not an Environment, but int"),
        ("FILE:Twice", {}, "two rewards have the same name"),
        ("nowhere.py:Own", {}, "nowhere.py: there is no such file"),
        ("no_such_module:Own", {}, "'no_such_module' cannot be imported"),
        ("arithmetic", {"held_out": 0}, "held_out = 0"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_words(
    tmp_path: Path, use: str, options: dict, message: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(ConfigError, match=message):
        load_environment(use.replace("FILE", str(file)), options)


def test_a_file_that_raises_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("raise KeyError('lost')")
    with pytest.raises(ConfigError, match="cannot be loaded: KeyError"):
        load_environment(f"{file}:Own", {})


def test_an_environment_may_reward_single_turns() -> None:
    class ByTurn(Arithmetic):
        def turn_rewards(self, task: Task, trajectory: Trajectory) -> dict[int, float]:
            return {turn.index: len(turn.output_ids) / 10 for turn in trajectory.turns}

    episode = make_trajectory([make_turn(0, None, [1], [2, 3]), make_turn(1, 0, [3], [4])])
    task = ByTurn().train_task(0)
    assert ByTurn().score(task, episode, "four", [{"role": "user"}]).turn_rewards == {0: 0.2, 1: 0.1}
    assert Arithmetic().score(task, episode, "four", [{"role": "user"}]).turn_rewards == {}
