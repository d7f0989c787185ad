"""The doctor's checks of states, tools and their rewards: each finds its planted fault, and nothing else."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.environments import TASK, Safe
from tidegate.doctor.comparison import IncomparableError, difference
from tidegate.doctor.findings import Finding, Level
from tidegate.doctor.rewards import check_rewards
from tidegate.doctor.states import check_states
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.base import Environment
from tidegate.envs.customer_service.customer_service import CustomerService
from tidegate.envs.mixture import Mixture
from tidegate.envs.rewards import Reward
from tidegate.envs.tools import Tool, tool
from tidegate.errors import ConfigError
from tidegate.evaluation.gold import grade_gold
from tidegate.types import Message, Task


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings if finding.level is not Level.OK]


def opened(state: dict[str, Any]) -> float:
    return float(state["entered"] == state["code"])


class Sound(Safe):
    """Its tools, except `read`, are described; its other side answers."""

    rewards: Sequence[Reward] = (Reward("opened", opened),)
    torn_down: ClassVar[list[Any]] = []

    def tools(self) -> Sequence[Tool]:
        return [one for one in super().tools() if one.name != "read"]

    async def teardown(self, state: Any) -> None:
        self.torn_down.append(state)


def test_a_sound_environment_is_well() -> None:
    Sound.torn_down.clear()
    (found,) = check_states(Sound(), 5.0)
    assert (found.level, found.text) == (Level.OK, "safe: 1 tool; setup, respond and teardown were run")
    assert len(Sound.torn_down) == 2
    assert codes(check_rewards(Sound())) == ["state_rewards"]
    assert len(Sound.torn_down) == 4, "each reward that is tried has a state of its own"


def test_built_in_environments_are_well() -> None:
    assert check_states(Arithmetic(held_out=10), 5.0) == []
    assert codes(check_states(CustomerService(), 5.0)) == []
    assert codes(check_rewards(CustomerService())) == ["state_rewards"]
    mixture = Mixture([{"use": "arithmetic"}, {"use": "customer_service"}])
    assert [one.text.partition(":")[0] for one in check_states(mixture, 5.0)] == ["customer_service"]


class SetupRaises(Sound):
    async def setup(self, task: Task) -> dict[str, Any]:
        raise LookupError("no database")


class SetupHangs(Sound):
    async def setup(self, task: Task) -> dict[str, Any]:
        return await asyncio.Event().wait()  # type: ignore[return-value]


class SetupBlocks(Sound):
    async def setup(self, task: Task) -> dict[str, Any]:
        time.sleep(5)  # noqa: ASYNC251
        return {}


class SetupDraws(Sound):
    async def setup(self, task: Task) -> dict[str, Any]:
        return {"entered": [], "code": task.answer, "replies": 0, "seeds": [1, random.random()]}


class SetupConnects(Sound):
    async def setup(self, task: Task) -> dict[str, Any]:
        return {"entered": [], "code": task.answer, "replies": 0, "shop": socket.socket()}

    async def teardown(self, state: dict[str, Any]) -> None:
        state["shop"].close()


class RespondRaises(Sound):
    async def respond(self, state: Any, reply: Message) -> Any:
        return state["nothing"]


class RespondsWithNumbers(Sound):
    async def respond(self, state: Any, reply: Message) -> Any:
        return 7


class TeardownRaises(Sound):
    async def teardown(self, state: Any) -> None:
        raise OSError("it is closed already")


class Undescribed(Sound):
    @tool
    def turn(self, angle: int) -> str:
        return str(angle)


class Untyped(Sound):
    @tool
    def turn(self, angle) -> str:  # type: ignore[no-untyped-def]
        """Turns."""
        return str(angle)


class Double(Sound):
    def tools(self) -> Sequence[Tool]:
        return [*super().tools(), *super().tools()]


class Changing(Sound):
    calls = 0

    def tools(self) -> Sequence[Tool]:
        self.calls += 1
        return [Tool(f"turn{self.calls}", "Turns.", {"type": "object"}, lambda *_: "")]


class Stateless(Arithmetic):
    rewards = (Reward("opened", opened),)


@pytest.mark.parametrize(
    ("environment", "code", "text"),
    [
        (SetupRaises(), "setup_raised", "on task door, setup raised LookupError: no database"),
        (SetupHangs(), "setup_hung", "setup of task door took longer than 0.5 s (env.call_timeout_s)"),
        (SetupBlocks(), "state_hung", "blocks for longer than env.call_timeout_s = 0.5"),
        (SetupDraws(), "setup_differs", "state['seeds'][1] differs"),
        (SetupConnects(), "setup_not_compared", "state['shop'] is a socket, which cannot be compared"),
        (RespondRaises(), "respond_raised", "respond raised KeyError: 'nothing'"),
        (RespondsWithNumbers(), "respond_raised", "respond returned int, not a message, a text or Done"),
        (TeardownRaises(), "teardown_raised", "teardown raised OSError: it is closed already"),
        (Undescribed(), "tools_undescribed", "which the model reads: turn, turn(angle)"),
        (Untyped(), "tools_invalid", "the parameter 'angle' needs a type hint"),
        (Double(), "tools_double", "2 tools named 'enter'"),
        (Changing(), "tools_change", "gives other tools each time"),
        (Stateless(), "reward_without_state", "asks for the state, but there is no setup"),
    ],
)
def test_an_environment_with_a_fault(environment: Environment, code: str, text: str) -> None:
    if code == "tools_undescribed":
        environment.tools = lambda: Safe.tools(environment)[2:]  # type: ignore[method-assign, arg-type]
    timeout_s = 0.5 if code.endswith("_hung") else 20.0
    found = [one for one in check_states(environment, timeout_s) if one.level is not Level.OK]
    assert [one.code for one in found] == [code]
    assert text in found[0].text


def test_async_rewards_are_awaited_and_a_state_is_torn_down_after_a_reward_that_raises() -> None:
    class Awaits(Sound):
        def gold_output(self, task: Task) -> str:
            return "open"

        async def said(self, output: str) -> float:
            await asyncio.sleep(0)
            return float(output == "open")

        def __init__(self) -> None:
            self.rewards = (Reward("said", self.said),)

    assert codes(check_rewards(Awaits())) == []

    async def raises(state: dict[str, Any]) -> float:
        raise LookupError("nobody was served")

    class Raises(Sound):
        rewards = (Reward("raises", raises),)

    Sound.torn_down.clear()
    (found,) = check_rewards(Raises())
    assert found.code == "reward_raised"
    assert "nobody was served" in found.text
    assert len(Sound.torn_down) == 1


async def test_gold_answers_are_graded_by_async_rewards_and_refused_to_rewards_of_a_state() -> None:
    async def right(output: str, answer: str) -> float:
        await asyncio.sleep(0)
        return float(output == answer)

    class Awaits(Arithmetic):
        rewards = (Reward("right", right),)

        def train_size(self) -> int:
            return 3

    splits = await grade_gold(Awaits(held_out=2))
    assert [(split.total, split.right) for split in splits][:2] == [(3, 3), (2, 2)]
    with pytest.raises(
        ConfigError, match="the reward 'opened' reads the episode's state, which only an agent"
    ):
        await grade_gold(Sound())


# -- comparison


@dataclass
class Order:
    item: str
    notes: dict[str, Any] = field(default_factory=dict)


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def looped(value: Any) -> list[Any]:
    cycle: list[Any] = [value]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("make", "other", "place"),
    [
        (lambda: {"a": [1, {2, 3}], "b": None}, {"a": [1, {2, 4}], "b": None}, "state['a'][1]"),
        (lambda: Order("lamp", {"n": Plain(x=1)}), Order("lamp", {"n": Plain(x=2)}), "state.notes['n'].x"),
        (lambda: Slots(1, Plain(y=(1, 2))), Slots(1, Plain(y=(1, 3))), "state.right.y[1]"),
        (lambda: random.Random(1), random.Random(2), "state"),
        (lambda: {"board": np.zeros((3, 3))}, {"board": np.ones((3, 3))}, "state['board']"),
        (lambda: deque([1, 2]), deque([1, 3]), "state[1]"),
        (lambda: looped(1), looped(2), "state[0]"),
        (lambda: [float("nan")], [1.0], "state[0]"),
        (lambda: {"a": 1}, {"b": 1}, "state"),
        (lambda: 1, "1", "state"),
    ],
)
def test_states_are_compared_by_their_content(make: Any, other: Any, place: str) -> None:
    assert difference(make(), make()) is None
    found = difference(make(), other)
    assert found is not None
    assert found.startswith(place)


def test_what_has_no_content_is_not_compared() -> None:
    with pytest.raises(IncomparableError, match=r"state\['lock'\] is a generator"):
        difference({"lock": (n for n in "a")}, {"lock": (n for n in "a")})
    assert difference(TASK, TASK) is None
