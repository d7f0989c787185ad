"""The comparison of two states finds the place at which they differ, whatever they consist of."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.environments import TASK
from tidegate.doctor.comparison import IncomparableError, difference


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


def test_values_without_content_are_not_compared() -> None:
    with pytest.raises(IncomparableError, match=r"state\['lock'\] is a generator"):
        difference({"lock": (n for n in "a")}, {"lock": (n for n in "a")})
    assert difference(TASK, TASK) is None
