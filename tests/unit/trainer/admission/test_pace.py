"""The limit of running episodes while engines are too slow for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tidegate.simulation.scenario import AgentModel, EngineModel, RuleModel, Scenario, Spread
from tidegate.simulation.world import SimulatedRun
from tidegate.trainer.admission.pace import Pace


def play(pace: Pace, wanted: int, rounds: int, seconds: Callable[[int], float], tokens: int) -> list[int]:
    """Runs episodes in rounds, each as many as are free; returns their numbers.

    `seconds` is the duration of an episode if so many run.
    """
    numbers = []
    for turn in range(rounds):
        number = int(min(wanted, pace.free))
        numbers.append(number)
        names = [f"{turn}.{episode}" for episode in range(number)]
        for name in names:
            pace.started(name)
        slow = seconds(number) > pace.deadline_s
        for name in names:
            pace.ended(name, 0 if slow else tokens, slow=slow)
    return numbers


def test_engines_of_twenty_tokens_per_second_get_as_many_episodes_as_they_serve() -> None:
    """128 episodes of 128 tokens need 819 s; in half of the deadline of 60 s the engines sample 600."""
    pace = Pace(deadline_s=60.0, tokens=128)
    pace.measured(20.0)
    numbers = play(pace, 128, 6, lambda number: number * 128 / 20, 128)
    assert numbers[:2] == [128, 4]
    assert max(numbers[1:]) * 128 / 20 <= 60


def test_fast_engines_have_no_limit() -> None:
    pace = Pace(deadline_s=60.0, tokens=128)
    pace.measured(20_000.0)
    assert play(pace, 128, 20, lambda number: number * 128 / 20_000, 128) == [128] * 20
    assert pace.limit == math.inf


def test_some_long_episodes_lower_nothing() -> None:
    pace = Pace(deadline_s=60.0, tokens=128)
    pace.measured(20.0)
    for number in range(200):
        pace.started(str(number))
        pace.ended(str(number), 100, slow=number % 10 == 9)
    assert pace.limit == math.inf


def test_timeouts_of_attempts_that_began_before_a_change_do_not_lower_the_limit_again() -> None:
    pace = Pace(deadline_s=60.0, tokens=128)
    pace.measured(20.0)
    for number in range(64):
        pace.started(str(number))
    for number in range(64):
        pace.ended(str(number), 0, slow=True)
    assert pace.limit == pytest.approx(20 * 60 / 2 / 128)


def test_an_unknown_rate_halves_the_number() -> None:
    pace = Pace(deadline_s=10.0, tokens=100)
    assert play(pace, 64, 5, lambda number: float(number), 100) == [64, 32, 16, 8, 8]


def test_the_limit_falls_if_replies_grow_and_rises_when_they_are_short_again() -> None:
    pace = Pace(deadline_s=60.0, tokens=128)
    pace.measured(100.0)
    play(pace, 64, 1, lambda number: 61.0, 128)
    first = pace.limit
    assert min(play(pace, 64, 8, lambda number: number * 400 / 100, 400)) <= 15
    assert pace.limit < first
    lowest = pace.limit
    play(pace, 64, 40, lambda number: 1.0, 10)
    assert pace.limit > lowest + 10


def test_one_episode_always_may_run() -> None:
    pace = Pace(deadline_s=1.0, tokens=4096)
    pace.measured(1.0)
    assert play(pace, 8, 5, lambda number: 100.0, 0)[1:] == [1] * 4


def test_ended_attempts_leave_room() -> None:
    pace = Pace(deadline_s=60.0, tokens=128, limit=2.0)
    pace.started("a")
    pace.started("b")
    assert pace.free < 1
    pace.forget("a")
    assert pace.free == 1


def test_a_simulated_run_on_slow_engines_trains() -> None:
    """32 episodes at a time would each take 160 s; without the limit nothing ends before its deadline."""
    scenario = Scenario(
        steps=4,
        engine=EngineModel(iteration_s=1e-6, request_s=0.05),
        agent=AgentModel(tokens=Spread(median=100), deadline_s=60.0),
        rules=RuleModel(groups_per_batch=2, group_size=8, max_staleness=1),
    )
    run = SimulatedRun(scenario)
    run.run()
    core = run._core
    assert run._step == 4
    assert core.pace.limit < 16
    assert core.failures.quarantined == set()
    assert core.outage.why is None
