"""Histograms by step of reward, length, staleness and advantage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_run import write_dashboard_run
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.statistics import distributions
from tidegate.viewer.dashboard.statistics.distributions import BINS, MOST_STEPS, histograms, shown_steps


@pytest.fixture(autouse=True)
def _time_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "BUDGET_S", math.inf)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    run: Path = write_dashboard_run(tmp_path_factory.mktemp("distributions") / "run").dir
    with TestClient(create_app(FollowedRun(run)), base_url="http://127.0.0.1") as found:
        yield found


def ask(client: TestClient, **query: Any) -> dict[str, Any]:
    response = client.get("/api/distributions", params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def quantity(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["quantities"] if one["name"] == name)


def test_each_step_has_a_histogram_of_all_its_episodes(client: TestClient) -> None:
    """Of six episodes, one of the good group, both of the alike and one of the old group have reward 1."""
    found = ask(client)
    assert (found["steps"], found["of"], found["unread"]) == ([1, 2, 3], 3, 0)
    reward = quantity(found, "Reward")
    assert (reward["levels"], reward["counts"]) == ([0, 1], [[2, 4]] * 3)
    assert reward["mean"] == [0.6667] * 3


def test_only_what_was_trained_on(client: TestClient) -> None:
    found = ask(client, which="trained", step=2)
    assert quantity(found, "Reward")["counts"] == [[1, 1]]
    assert (quantity(found, "Staleness")["levels"], quantity(found, "Staleness")["counts"]) == ([1], [[2]])
    advantage = quantity(found, "Advantage")
    assert (advantage["levels"], advantage["counts"]) == ([-0.7071, 0.7071], [[1, 1]])


def test_a_step_that_was_not_taken_has_none(client: TestClient) -> None:
    found = ask(client, step=9)
    assert found["steps"] == []
    assert quantity(found, "Reward")["counts"] == []


def test_a_request_that_runs_out_of_time_is_continued(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "BUDGET_S", -1.0)
    found = ask(client)
    assert (found["steps"], found["unread"]) == ([1], 2)


def test_many_values_share_bins_of_a_round_width() -> None:
    values = [0.01 * index for index in range(101)]
    found = histograms([values, [], [1.0]])
    assert found["levels"] is None
    widths = {round(high - low, 9) for low, high in zip(found["edges"], found["edges"][1:], strict=False)}
    assert widths == {0.05}
    assert len(found["edges"]) <= BINS + 2
    assert [sum(counts) for counts in found["counts"]] == [101, 0, 1]
    assert (found["mean"], found["low"][0], found["high"][0]) == ([0.5, None, 1.0], 0.1, 0.9)


def test_advantages_that_cancel_have_the_mean_zero() -> None:
    assert histograms([[0.1, 0.2, -0.3]])["mean"] == [0.0]


def test_a_long_run_shows_few_steps_and_always_the_newest() -> None:
    steps = list(range(1, 1002))
    shown = shown_steps(steps)
    assert len(shown) <= MOST_STEPS
    assert (shown[0], shown[1], shown[-1]) == (1, 17, 1001)
    grown = shown_steps([*steps, 1002])
    assert set(shown[:-1]) <= set(grown)
    assert shown_steps([3, 4]) == [3, 4]
