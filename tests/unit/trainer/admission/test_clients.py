"""Groups that clients form: how admission accepts or refuses them, and a client's share of a batch."""

from __future__ import annotations

import pytest

from tests.unit.trainer.admission.test_admission import Driver
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.types import Group


@pytest.mark.parametrize(
    ("versions", "refusal"),
    [
        ((1, 1), None),
        ((1, 2), "it has tokens of version 2, which this run has not published"),
        ((2, 2), "it has tokens of version 2, which this run has not published"),
        ((0, 1), "stale: its oldest token is of version 0, the trainer is at version 1"),
        ((1,), "it has 1 episodes, and the run takes 2"),
    ],
)
def test_a_clients_group_enters_the_ledger_or_is_refused(
    versions: tuple[int, ...], refusal: str | None
) -> None:
    driver = Driver(max_staleness=0)
    driver.publish(1)
    driver.book.clear()
    group = Group("c1", "t", [make_trajectory([make_turn(0, None, [1], [2], version=v)]) for v in versions])
    why = driver.core.accept(group)
    assert why is None if refusal is None else refusal in (why or "")
    issued = [(line["kind"], line["id"]) for line in driver.book]
    assert bool(issued) == (refusal is None), "what is refused is in no entry"
    assert len(driver.core.groups) == (refusal is None)


def offer(driver: Driver, name: str, client: str) -> str | None:
    """Offers a client's group of two episodes on the live version."""
    episodes = [make_trajectory([make_turn(0, None, [1], [2], version=driver.core.version)]) for _ in "ab"]
    for episode in episodes:
        episode.client = client
    return driver.core.accept(Group(name, "t", episodes))


def test_one_client_has_at_most_its_share_of_a_batch() -> None:
    driver = Driver(groups_per_batch=4, client_share=0.5, max_staleness=None)
    for number in range(5):
        assert offer(driver, f"loud{number}", "loud") is None
    assert driver.core.select_batch() is None, "two of the loud one are no batch"
    own = driver.ready(0)
    assert driver.core.select_batch() is None
    assert offer(driver, "quiet0", "quiet") is None
    selection = driver.core.select_batch()
    assert selection is not None
    assert selection == ["loud0", "loud1", own, "quiet0"], "in order, the loud one's others wait"
    assert offer(driver, "quiet1", "quiet") is None
    assert driver.core.select_batch() is None
    assert offer(driver, "quiet2", "quiet") is None
    assert (batch := driver.core.select_batch()) is not None
    assert batch == ["loud2", "loud3", "quiet1", "quiet2"]


def test_a_client_that_waits_for_its_share_is_refused_at_a_limit() -> None:
    driver = Driver(groups_per_batch=4, client_share=0.5, max_staleness=1)
    refusals = [offer(driver, f"loud{number}", "loud") for number in range(5)]
    assert refusals[:4] == [None] * 4, "two batches' worth: the capacity of the bound"
    assert refusals[4] == "4 groups of loud wait, and trainer.max_client_share = 0.5 admits 2 to a batch"
    assert offer(driver, "quiet", "quiet") is None
    unlimited = Driver(groups_per_batch=4, max_staleness=1)
    assert [offer(unlimited, f"loud{number}", "loud") for number in range(20)] == [None] * 20
