"""The checks of an environment find planted faults."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest

from tests.unit.doctor.common import Sound, codes, settings_of
from tidegate.doctor import environment as rooms
from tidegate.doctor.environment import check_environment
from tidegate.doctor.rewards import check_rewards
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.base import Environment
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.types import Task


class Raises(Sound):
    def train_task(self, index: int) -> Task:
        raise LookupError("no more tasks")


class Changes(Sound):
    drawn = 0

    def train_task(self, index: int) -> Task:
        self.drawn += 1
        return self.task(f"t{index}", self.drawn)


class Misnamed(Sound):
    name: ClassVar[str] = "misnamed"


class NotJson(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(
            id, "sound", [{"role": "user", "content": f"{number}?"}], answer=f"{number}", info={"s": {1}}
        )


class Long(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "user", "content": f"{number} " * 500}], "#### 1")


class NoHeldOut(Sound):
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"other": []}


class Leaks(Sound):
    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.train_task(5), self.task("h", 9000)]}


class Arrays(Sound):
    def task(self, id: str, number: int) -> Task:
        asked = [{"role": "user", "content": f"{number}?"}]
        return Task(id, "sound", asked, "#### 1", {"numbers": np.arange(3)})


class Text(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", "What is 1 + 1?", "#### 2")  # type: ignore[arg-type]


class Images(Sound):
    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "martian", "content": ["?"]}], "#### 1")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("Missing", "environment_unloadable", "has no environment 'Missing'"),
        ("Raises", "environment_raised", "raised LookupError: no more tasks"),
        ("Changes", "tasks_change", "another task for the same index"),
        ("Misnamed", "task_env", "env = 'sound', and the environment's name is 'misnamed'"),
        ("NotJson", "task_not_json", "not JSON serializable"),
        ("Arrays", "task_not_json", "ndarray is not JSON serializable"),
        ("Text", "task_messages", "'What is 1 + 1?', which are not a list of messages"),
        ("Long", "prompt_too_long", "more than engine.max_context = 512"),
        ("NoHeldOut", "no_held_out", "no main held-out set"),
        ("Leaks", "held_out_trained", "1 of 2 held-out tasks"),
    ],
)
def test_an_environment_with_a_fault(renderer: Renderer, name: str, code: str, text: str) -> None:
    settings = settings_of(env={"use": f"{__name__}:{name}"}, engine={"max_context": 512})
    found = {one.code: one for one in check_environment(settings, renderer)[0]}
    assert list(found) == [code]
    assert text in found[code].text


def test_an_environment_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Hangs(Sound):
        def train_task(self, index: int) -> Task:
            ended.wait(20)
            raise AssertionError

    monkeypatch.setattr(rooms, "CALL_S", 0.05)
    monkeypatch.setattr(rooms, "load_environment", lambda *_: Hangs())
    assert codes(check_environment(settings_of(), None)[0]) == ["environment_hung"]
    ended.set()


@pytest.mark.parametrize("environment", [Sound(), Arithmetic(held_out=10)])
def test_a_valid_environment_has_no_finding(environment: Environment, renderer: Renderer) -> None:
    assert codes(check_rewards(environment)) == []
    if isinstance(environment, Sound):
        settings = settings_of(env={"use": f"{__name__}:Sound"})
        assert codes(check_environment(settings, renderer)[0]) == []
