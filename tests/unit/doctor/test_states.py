"""The checks of states and tools find planted faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.doctor.common import Sound, codes
from tidegate.doctor import states
from tidegate.doctor.findings import Level
from tidegate.doctor.rewards import check_rewards
from tidegate.doctor.states import check_states
from tidegate.envs.rewards import Reward
from tidegate.envs.tools import Tool, tool
from tidegate.types import Message, Task


async def known(output: str, answer: str, state: Any) -> float:
    return float(state["answer"] == answer == output)


class Stateful(Sound):
    """Its reward is async and reads the state."""

    rewards = (Reward("known", known),)

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.released: list[Any] = []

    async def setup(self, task: Task) -> Any:
        self.made.append({"answer": task.answer, "lock": None})
        return self.made[-1]

    async def teardown(self, state: Any) -> None:
        self.released.append(state)

    @tool
    async def look(self, state: Any, place: int) -> str:
        """Looks at a place.

        Args:
            place: From 0 to 9.
        """
        return "nothing"


def test_a_valid_stateful_environment_has_no_finding_and_its_states_are_released() -> None:
    environment = Stateful()
    assert [one.level for one in check_states(environment)] == [Level.OK]
    assert codes(check_rewards(environment)) == []
    assert len(environment.made) > 2 + 8
    assert len(environment.released) == len(environment.made)
    assert check_states(Sound()) == []


class Undescribed(Stateful):
    @tool
    def peek(self, place: int) -> str:
        return ""


class NoSetup(Sound):
    rewards = (Reward("known", lambda state: 1.0),)


class DrawsAgain(Stateful):
    async def setup(self, task: Task) -> Any:
        return {"made": len(self.made), **await super().setup(task)}


class Incomparable(Stateful):
    async def setup(self, task: Task) -> Any:
        return {**await super().setup(task), "lock": threading.Lock(), "at": object()}


class Arrayed(Stateful):
    async def setup(self, task: Task) -> Any:
        return {**await super().setup(task), "board": np.arange(3)}


class NoAnswer(Stateful):
    async def respond(self, state: Any, reply: Message) -> Message:
        return state["question"]


class Double(Stateful):
    def tools(self) -> Sequence[Tool]:
        return [*super().tools(), *super().tools()]


class Untyped(Stateful):
    @tool
    def peek(self, place) -> str:  # type: ignore[no-untyped-def]
        """Peeks."""
        return str(place)


class NoDatabase(Stateful):
    async def setup(self, task: Task) -> Any:
        raise ConnectionError("no database")


class NotReleased(Stateful):
    async def teardown(self, state: Any) -> None:
        raise OSError("it is in use")


@pytest.mark.parametrize(
    ("environment", "level", "found"),
    [
        (
            Incomparable,
            Level.NOTE,
            {"setup_not_compared": "state['lock'] is a lock, which cannot be compared"},
        ),
        (Arrayed, Level.OK, {"ok": "setup, respond and teardown work"}),
        (
            NoSetup,
            Level.ERROR,
            {"state_without_setup": "'known' reads the state, and 'sound' has no setup"},
        ),
        (DrawsAgain, Level.WARNING, {"setup_changes": "for the same task t0: state['made'] differs"}),
        (NoAnswer, Level.ERROR, {"state_raised": "respond raised KeyError: 'question'"}),
        (Double, Level.ERROR, {"tools_double": "'sound' has 2 tools named 'look'"}),
        (Untyped, Level.ERROR, {"tools_invalid": "the parameter 'place' needs a type hint"}),
        (NoDatabase, Level.ERROR, {"state_raised": "setup raised ConnectionError: no database"}),
        (NotReleased, Level.ERROR, {"state_raised": "teardown raised OSError: it is in use"}),
    ],
)
def test_a_stateful_environment_with_a_fault(
    environment: type[Sound], level: Level, found: dict[str, str]
) -> None:
    (one,) = check_states(environment())
    assert (one.level, one.code) == (level, next(iter(found)))
    assert found[one.code] in one.text


def test_tools_without_descriptions() -> None:
    found = check_states(Undescribed())
    assert [(one.level, one.code) for one in found] == [(Level.WARNING, "tool_undescribed")] * 2
    assert "'peek' has no description" in found[0].text
    assert "'peek' does not describe 'place'" in found[1].text


def test_a_setup_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Stateful):
        async def setup(self, task: Task) -> Any:
            await asyncio.sleep(20)

    monkeypatch.setattr(states, "EPISODE_S", 0.05)
    assert codes(check_states(Hangs())) == ["state_hung"]


def test_rewards_of_a_state_that_no_episode_changed_cannot_be_judged() -> None:
    class Untouched(Stateful):
        rewards = (Reward("opened", lambda state: float(state["answer"] is None)),)

    (one,) = check_rewards(Untouched())
    assert (one.level, one.code) == (Level.NOTE, "reads_state")
    assert codes(check_rewards(NotReleased())) == ["state_raised"]
