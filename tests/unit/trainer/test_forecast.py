"""The prediction of seconds per step and per evaluation, and the measurement behind it."""

from __future__ import annotations

from pathlib import Path

from tests.fakes import staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.config import Settings
from tidegate.trainer.forecast import advice, forecast, measure_rate
from tidegate.types import Task


def settings_of(**sections: dict[str, object]) -> Settings:
    return Settings.model_validate({"model": {"path": "model"}, **sections})


def test_default_settings_with_engines_of_twenty_tokens_per_second() -> None:
    """NVIDIA-NeMo/Gym#3351: the shipped limit of tokens needed more time than the shipped timeout."""
    settings = settings_of()
    line = forecast(settings, 20.0)
    assert "20 tokens/s: at most 819 s of sampling a step (128 episodes" in line
    assert "2,560 s an evaluation (400 episodes)" in line
    told = " ".join(f"{text}: {fix}" for text, fix in advice(settings, 20.0))
    assert "raise agent.deadline_s to 103" in told
    assert "lower eval.tasks to 23, or raise eval.deadline_s to 2560" in told
    assert "lower trainer.groups_per_batch" in told


def test_the_settings_that_it_names_are_enough() -> None:
    settings = settings_of(
        agent={"deadline_s": 103}, eval={"tasks": 23}, trainer={"groups_per_batch": 8}, run={"name": "r"}
    )
    assert list(advice(settings, 20.0)) == []


def test_fast_engines_need_no_advice() -> None:
    assert list(advice(settings_of(), 5000.0)) == []
    assert "about 7.68 s of sampling a step" in forecast(settings_of(), 500.0, tokens=30.0)


def test_an_evaluation_has_no_more_episodes_than_tasks_are_held_out() -> None:
    settings = settings_of(eval={"suites": {"hard": {"set": "rare", "tasks": 3}}})
    task = Task("t", "env", [])
    sets = {"": [task] * 8, "rare": [task] * 2}
    assert "an evaluation (20 episodes)" in forecast(settings, 20.0, 30.0, sets)  # 2 × 8 + 2 + 2
    assert "an evaluation (403 episodes)" in forecast(settings, 20.0, 30.0)
    assert [fix for text, fix in advice(settings, 20.0, 30.0, sets) if "evaluation" in text] == []


def test_the_named_number_of_tasks_is_enough_for_several_sets() -> None:
    task = Task("t", "env", [])
    sets = {"": [task] * 900, "rare": [task] * 900}
    ((_, fix),) = advice(settings_of(), 20.0, 30.0, sets)
    assert "lower eval.tasks to 66, or" in fix
    assert list(advice(settings_of(eval={"tasks": 66}), 20.0, 30.0, sets)) == []
    many = settings_of(eval={"suites": {"all": {"tasks": 900}}})
    assert [fix for _, fix in advice(many, 20.0, 30.0, sets)] == ["raise eval.deadline_s to 2250"]


async def test_the_rate_is_measured_on_the_engines(tmp_path: Path) -> None:
    async with staged(make_model_dir(tmp_path / "tiny")) as stage:
        assert await measure_rate([stage.engine.url], 4) > 0
        assert len(stage.engine.requests) == 6
        await stage.engine.stop()
        assert await measure_rate([stage.engine.url], 4) == 0
