"""The seeded driver over many simulated runs: no order of events breaks the ledger or the bound."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.admission_driver import Killed, World
from tidegate.trainer.admission.rules import Rules

WORLDS = st.builds(
    Rules,
    groups_per_batch=st.integers(1, 4),
    group_size=st.integers(2, 4),
    min_group_size=st.just(2),
    max_staleness=st.sampled_from([0, 1, 2, 4, None]),
    publish_interval=st.integers(1, 4),
    max_attempts=st.integers(1, 3),
    max_infra_attempts=st.integers(1, 4),
    max_stale_retries=st.integers(0, 2),
    max_running=st.sampled_from([2, 5, 1000]),
)


@settings(max_examples=60, deadline=None)
@given(
    WORLDS, st.integers(0, 2**32), st.floats(0, 0.5), st.floats(0, 0.9), st.sampled_from([0.0, 0.005, 0.05]),
    st.sampled_from([0.0, 0.01]), st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_any_world(
    rules: Rules, seed: int, failure: float, reject: float, crash: float, outage: float, client: float
) -> None:
    World(rules, random.Random(seed), failure, reject, crash, outage, client).run(400)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_outages_continues_and_quarantines_no_task(seed: int) -> None:
    rules = Rules(
        groups_per_batch=2,
        group_size=4,
        min_group_size=2,
        max_staleness=2,
        max_attempts=2,
        max_infra_attempts=3,
    )
    world = World(rules, random.Random(seed), 0.5, 0.1, 0.001, 0.005)
    world.run(4_000)
    told = [one["event"] for one in world.book if one["kind"] == "run"]
    assert told.count("paused") > 5
    assert any(one.get("spared") for one in world.book)
    assert world.step > 5


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_run_makes_progress(seed: int) -> None:
    rules = Rules(
        groups_per_batch=4, group_size=4, min_group_size=3, max_staleness=2, publish_interval=1 + seed % 2
    )
    world = World(rules, random.Random(seed), crash_rate=0.001, client_rate=0.02)
    world.run(8_000)
    assert world.step > 20
    assert world.crashes > 0
    assert "stale" in world.states.values()
    assert {world.states.get(name) for name in world.offered} >= {"stepped"}


@pytest.mark.parametrize("entries", range(1, 5))
def test_a_client_group_whose_acceptance_a_crash_interrupts_is_trained_on_whole_or_not(entries: int) -> None:
    trained = 0
    for seed in range(8):
        world = World(
            Rules(groups_per_batch=1, group_size=3, min_group_size=3, max_staleness=2),
            random.Random(seed),
            reject_rate=0.0,
        )
        world.fuse = entries
        with contextlib.suppress(Killed):
            while True:
                world.offer()
        world.crash()
        for group in world.ready:
            world.lease(group)
        world.train()
        world.check()
        trained += world.step
    assert (trained > 0) == (entries == 4), (
        "the gateway has the group: it continues if its entries are complete"
    )


@pytest.mark.slow
def test_two_hundred_thousand_events() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        rules = Rules(
            groups_per_batch=rng.randint(1, 6),
            group_size=rng.randint(2, 6),
            min_group_size=2,
            max_staleness=rng.choice([0, 1, 2, 4, None]),
            publish_interval=rng.randint(1, 4),
        )
        World(rules, rng, rng.random() / 3, rng.random() * 0.8, rng.choice([0, 0.002]), 0.001, 0.02).run(
            10_000
        )
