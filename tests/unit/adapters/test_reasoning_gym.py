"""Data sets of reasoning-gym through Tidegate."""

from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym")

from tests.unit.adapters.scored import equal_scores
from tidegate.envs.base import load_environment
from tidegate.errors import ConfigError


def test_scores_are_the_librarys() -> None:
    equal_scores("reasoning_gym")


@pytest.mark.parametrize("tag", [True, False])
def test_gold_outputs_are_right(tag: bool) -> None:
    for id in ("spell_backward", "chain_sum", "basic_arithmetic", "caesar_cipher"):
        environment = load_environment(f"reasoning_gym:{id}", {"held_out": 10, "answer_tag": tag})
        for task in environment.eval_sets()[""]:
            gold = environment.gold_output(task)
            assert environment.score(task, None, gold, []).reward == 1.0


def test_tasks_follow_from_their_index_and_held_out_questions_are_not_trained_on() -> None:
    options = {"held_out": 50, "config": {"min_word_len": 3, "max_word_len": 3}}
    environment = load_environment("reasoning_gym:spell_backward", options)
    again = load_environment("reasoning_gym:spell_backward", options)
    indices = [0, 1, 499, 500, 12_345, 3]
    tasks = [environment.train_task(index) for index in indices]
    assert [again.train_task(index) for index in reversed(indices)] == tasks[::-1]
    held_out = {task.messages[-1]["content"] for task in environment.eval_sets()[""]}
    assert len(held_out) == 50
    trained = {environment.train_task(index).messages[-1]["content"] for index in range(1500)}
    assert not held_out & trained


def test_the_prompt_is_the_librarys_unless_another_is_set() -> None:
    task = load_environment("reasoning_gym:chain_sum", {}).train_task(0)
    assert "<answer>answer here</answer>" in task.messages[0]["content"]
    task = load_environment("reasoning_gym:chain_sum", {"system": ""}).train_task(0)
    assert [message["role"] for message in task.messages] == ["user"]


def test_names_and_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="no data set 'spell_backwards'; did you mean 'spell_backward'"):
        load_environment("reasoning_gym:spell_backwards", {})
    with pytest.raises(ConfigError, match=r"no setting config\.min_word; did you mean 'min_word_len'"):
        load_environment("reasoning_gym:spell_backward", {"config": {"min_word": 3}})
    with pytest.raises(ConfigError, match=r"no setting config\.seed"):
        load_environment("reasoning_gym:spell_backward", {"config": {"seed": 3}})
    with pytest.raises(ConfigError, match="refuses its config"):
        load_environment("reasoning_gym:spell_backward", {"config": {"min_word_len": 9, "max_word_len": 3}})
