"""Environments of Gymnasium as text."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from tests.unit.adapters.scored import equal_scores
from tidegate.envs.base import Done, load_environment
from tidegate.errors import ConfigError

LAKE = {"make": {"is_slippery": False}}
WAY = ("down", "down", "right", "right", "down", "right")

WRAPPER = """
import gymnasium

class Force(gymnasium.ActionWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.action_space = gymnasium.spaces.Discrete(2)

    def action(self, action):
        return [(-1.0, 1.0)[action]]
"""


def test_scores_are_the_librarys() -> None:
    equal_scores("gymnasium")


async def test_frozen_lake_is_crossed_by_words() -> None:
    environment = load_environment("gymnasium:FrozenLake-v1", LAKE)
    task = environment.train_task(0)
    assert task.messages[0]["content"] == (
        "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up. Reply with one action."
    )
    assert environment.train_task(0) == task
    state = await environment.setup(task)
    for word in WAY[:-1]:
        answer = await environment.respond(state, {"role": "assistant", "content": f"not left but {word}!"})
        assert isinstance(answer, str)
    assert answer == "  (Down)\nSFFF\nFHFH\nFFFH\nHF[F]G"
    assert await environment.respond(state, {"content": WAY[-1].upper()}) == Done()
    scored = environment.score(task, None, "", [], state)
    assert (scored.reward, scored.metrics) == (1.0, {"game_steps": 6, "game_ended": 1.0})
    await environment.teardown(state)


async def test_replies_without_an_action_are_answered_then_end_the_episode() -> None:
    environment = load_environment("gymnasium:FrozenLake-v1", LAKE)
    state = await environment.setup(environment.train_task(0))
    answers = [await environment.respond(state, {"content": reply}) for reply in ("upwards", None, "")]
    assert answers[0] == "There is no action in the reply. Actions: left, down, right, up."
    assert answers[2] == Done()
    assert state.steps == 0


async def test_own_words_and_numbers_name_actions() -> None:
    own = load_environment("gymnasium:Blackjack-v1", {"actions": ["Stay", "Card please"]})
    assert own.action("A Card Please") == 1  # type: ignore[attr-defined]
    numbered = load_environment("gymnasium:CartPole-v1", {})
    assert numbered.train_task(0).messages[0]["content"].endswith("Actions: 0, 1. Reply with one action.")


async def test_a_wrapper_makes_an_environment_fit(tmp_path: Path) -> None:
    (tmp_path / "force.py").write_text(WRAPPER)
    with pytest.raises(ConfigError, match=r"action space Box.*set env.options.wrapper"):
        load_environment("gymnasium:MountainCarContinuous-v0", {})
    options = {"wrapper": f"{tmp_path / 'force.py'}:Force", "actions": ["left", "right"]}
    environment = load_environment("gymnasium:MountainCarContinuous-v0", options)
    state = await environment.setup(environment.train_task(0))
    assert isinstance(await environment.respond(state, {"content": "right"}), str)
    assert state.rewards == pytest.approx(-0.1)


def test_names_and_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="no environment 'FrozenLake-v'; did you mean 'FrozenLake"):
        load_environment("gymnasium:FrozenLake-v", {})
    with pytest.raises(ConfigError, match="has 4 actions, but actions names 1"):
        load_environment("gymnasium:FrozenLake-v1", {"actions": ["on"]})
    with pytest.raises(ConfigError, match=r"cannot be made: TypeError.*slippery"):
        load_environment("gymnasium:FrozenLake-v1", {"make": {"slippery": False}})
