"""A gateway's groups as rows of TRL: left out, and refused. TRL itself is in tests/e2e/test_trl.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.errors import ConfigError, TrainingError
from tidegate.turn import Turn
from tidegate.types import Group

EOS = 9


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with TRL's base classes replaced, as TRL is not installed here."""
    made = SimpleNamespace(from_list=list)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=made))
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=object, GRPOTrainer=Base))
    monkeypatch.delitem(sys.modules, "tidegate.trainer.trl", raising=False)
    yield importlib.import_module("tidegate.trainer.trl")
    sys.modules.pop("tidegate.trainer.trl", None)


class Base:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return {"sampling_per_token_logps": inputs}


class Own:
    """Gives the groups that are wanted."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    async def batch(self, number: int, wanted: Callable[[Group], bool]) -> list[Group]:
        return [group for group in self.groups if wanted(group)][:number]


def group(name: str, *episodes: list[Turn], rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    members = [make_trajectory(turns) for turns in episodes]
    for member, reward in zip(members, rewards, strict=True):
        member.reward, member.group_id = reward, name
    return Group(name, "t", members, name)


def two_turns(version: int = 3, **more: Any) -> list[Turn]:
    return [make_turn(0, None, [1, 2], [3, 4], version=version), make_turn(1, 0, [5], [6, EOS], **more)]


def batch_of(trl: ModuleType, groups: list[Group], number: int, *, training: bool = True) -> dict[str, Any]:
    rollouts = trl.Rollouts("http://gateway", [], None)
    rollouts._own = Own(groups)
    trainer = SimpleNamespace(
        args=SimpleNamespace(num_generations=2, temperature=1.0),
        model=SimpleNamespace(training=training), processing_class=SimpleNamespace(eos_token_id=EOS),
    )  # fmt: skip
    batch: dict[str, Any] = rollouts(["", ""] * number, trainer)
    rollouts._runner.close()
    return batch


def test_a_row_is_an_episode_with_its_recorded_tokens(trl: ModuleType) -> None:
    silent = [make_turn(0, None, [1], [2], delivered=False)]
    batch = batch_of(trl, [group("a", two_turns(), silent)], 1)
    assert batch["prompt_ids"] == [[1, 2], [EOS]]
    assert batch["completion_ids"] == [[3, 4, 5, 6, EOS], [EOS]]
    assert batch["env_mask"] == [[1, 1, 0, 1, 1], [0]]
    assert batch["versions"] == [[3, 3, -1, 0, 0], [-1]]
    assert batch["logprobs"][0] == pytest.approx([-0.003, -0.004, 0, -0.006, -0.009])
    assert trl.episode_reward(batch["reward"], prompts=[]) == [0.0, 1.0]


def test_groups_that_trl_has_no_place_for_are_left_out(
    trl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    branch = [*two_turns(), make_turn(2, None, [7], [8])]
    equal = group("equal", two_turns(), two_turns(), rewards=(1.0, 1.0))
    batch = batch_of(trl, [group("b", two_turns(), branch), equal, group("a", two_turns(), two_turns())], 1)
    assert batch["group_id"] == ["a", "a"]
    assert "group b is left out: session" in caplog.text


def test_what_trl_would_train_on_wrongly_is_refused(trl: ModuleType) -> None:
    with pytest.raises(ConfigError, match="group a has 1 episodes, TRL's num_generations is 2"):
        batch_of(trl, [group("a", two_turns(), rewards=(1.0,))], 1)
    with pytest.raises(TrainingError, match=r"temperature 0\.5, TRL's temperature is 1\.0"):
        batch_of(trl, [group("a", two_turns(), two_turns(temperature=0.5))], 1)
    narrow = two_turns()
    narrow[1].kept_ids, narrow[1].kept_counts = np.array([6, 7, EOS], np.int32), np.array([2, 1], np.int32)
    with pytest.raises(TrainingError, match="sampled with top-p, top-k or min-p"):
        batch_of(trl, [group("a", two_turns(), narrow)], 1)
    with pytest.raises(ConfigError, match="eval_strategy"):
        batch_of(trl, [], 1, training=False)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_steps": -1}, "set max_steps"),
        ({"use_vllm": True}, "use_vllm = False"),
        ({"num_iterations": 2}, "num_iterations is 2"),
        ({"steps_per_generation": 4}, "steps_per_generation is 4"),
        ({"world_size": 2}, "there are 2 processes"),
    ],
)
def test_settings_that_break_a_guarantee_are_refused(
    trl: ModuleType, setting: dict[str, Any], said: str
) -> None:
    good = {
        "max_steps": 3, "use_vllm": False, "num_iterations": 1, "steps_per_generation": 1, "world_size": 1,
        "gradient_accumulation_steps": 1, "generation_batch_size": 8, "num_generations": 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        trl.GatewayGRPOTrainer("rollouts", SimpleNamespace(**good | setting))
    trainer = trl.GatewayGRPOTrainer("rollouts", SimpleNamespace(**good), model="m")
    assert len(trainer.arguments["train_dataset"]) == 12
    assert trainer._generate_and_score_completions([1])["old_per_token_logps"] == [1]
