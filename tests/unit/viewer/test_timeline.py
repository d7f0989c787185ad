"""The timeline of a few steps: phases of the trainer, load of the engines, groups that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_run import PROMPT, Writer, write_dashboard_run
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State
from tidegate.turn import VersionSpan
from tidegate.types import Group, Outcome, ToolCall
from tidegate.viewer.dashboard import run as followed
from tidegate.viewer.dashboard import timeline
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.timeline import BINS, calls_of, concurrency

START = 1_700_000_000.0


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


def write_timed_run(run_dir: Path) -> Writer:
    """Steps 1 to 3 of ten seconds each: 4 s of waiting, 3 s of update, 1 s of publish, 2 s of evaluation.

    Each trains on a group whose two episodes make a call of 2 s, use a tool for 1 s, and make a call of 1 s,
    from 8 s before the step's update on; the rewards of step 3's take 0.5 s.
    """
    run = Writer(run_dir)
    phases = {"time/step": 10.0, "time/wait_for_batch": 4.0, "time/update": 3.0, "time/publish": 1.0}
    for step in (1, 2, 3):
        end = START + 10.0 * step
        at = end - 10.0 + 4.0 - 8.0
        episodes = []
        for slot in range(2):
            version = (VersionSpan(step, 0, 3),)
            turns = [
                run.turn(0, None, PROMPT, "#### 7", started=at, seconds=2.0, version_spans=version),
                run.turn(1, 0, "\ntool 7\n", "#### 7", started=at + 3.0, seconds=1.0, version_spans=version),
            ]
            tool = ToolCall("add", {}, "7", False, 0, at + 2.0, 1.0)
            timed = {"reward_started": at + 4.0, "reward_seconds": 0.5} if step == 3 else {}
            episodes.append(
                run.trajectory(f"g{step}", slot, turns, float(slot), seconds=4.0, tool_calls=[tool], **timed)
            )
        batch = Batch(step, [0], [Group(f"g{step}", "t", episodes)], [], 4.0, 0.1)
        batch.advantages = [[-1.0, 1.0]]
        run.files.batch(batch, step)
        evaluation = {"eval/reward": 0.5, "eval/seconds": 2.0}
        run.metrics(step, time=end, **phases, **evaluation)
        run.ledger.record(
            {"kind": "run", "event": "publishing", "version": step, "step": step, "time": end - 3.0}
        )
    return run


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    return write_timed_run(tmp_path / "run")


@pytest.fixture
def client(run: Writer) -> Iterator[TestClient]:
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as found:
        yield found


def ask(client: TestClient, **query: Any) -> Any:
    response = client.get("/api/timeline", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_phases_of_the_trainer(client: TestClient) -> None:
    found = ask(client, step=2, span=1)
    assert (found["first"], found["step"], found["seconds"]) == (2, 2, 10)
    assert (found["before"], found["after"]) == (1, 3)
    assert [(one["name"], one["start"], one["end"]) for one in found["trainer"]] == [
        ("wait for groups", 0, 4), ("update", 4, 7), ("publish", 7, 8), ("evaluation", 8, 10),
    ]  # fmt: skip
    several = ask(client, span=3)
    assert (several["first"], several["step"], several["seconds"]) == (1, 3, 30)
    assert (several["before"], several["after"]) == (None, None)
    assert several["trainer"][4] == {"name": "wait for groups", "step": 2, "start": 10, "end": 14}


def test_what_no_phase_explains_is_other_and_an_evaluation_beside_is_none(
    run: Writer, client: TestClient
) -> None:
    run.metrics(4, time=START + 40, **{"time/step": 10.0, "time/update": 3.0, "time/wait_for_batch": 4.0,
                                       "eval/seconds": 9.0, "eval/step": 3.0})  # fmt: skip
    names = [(one["name"], one["start"], one["end"]) for one in ask(client, span=1)["trainer"]]
    assert names == [("wait for groups", 0, 4), ("update", 4, 7), ("other", 7, 10)]


def test_publishes_and_episodes_of_the_window(client: TestClient) -> None:
    """Step 2 lasts from 10 s to 20 s. Its own episodes ended at 10 s; those of step 3 begin at 16 s."""
    found = ask(client, step=2, span=1)
    assert [(one["at"], one["version"]) for one in found["publishes"]] == [(7, 2)]
    assert [(one["group"], one["step"]) for one in found["episodes"]] == [("g3", 3), ("g3", 3)]
    assert found["episodes"][0]["calls"] == [
        [6, 8, 3, "", "engine"], [9, 10, 3, "", "engine"], [8, 9, None, "add", "tools"],
        [10, 10.5, None, "rewards", "rewards"],
    ]  # fmt: skip
    assert found["omitted"] == 0


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ({2: 13.0, 4: 17.0}, [(10, 13, 1), (13, 17, 2), (17, 20, 4)]),
        ({2: 13.0}, [(10, 13, 1), (13, 20, 4)]),  # 4 has no time: none for 2, whose end it would be
        ({2: 9.0, 4: 99.0}, [(10, 20, 2), (20, 20, 4)]),  # clocks differ: nothing outside the call
        ({}, [(10, 20, 4)]),
    ],
)
def test_a_call_changes_its_version_at_a_publish(
    published: dict[int, float], expected: list[tuple[float, float, int]]
) -> None:
    turn = {"started": 10.0, "seconds": 10.0, "version_spans": [[1, 0, 2], [2, 2, 3], [4, 3, 5]]}
    calls = calls_of({"turns": [turn]}, published)
    assert [(call.start, call.end, call.version) for call in calls] == expected


def test_the_load_adds_up_to_the_episodes_that_run(client: TestClient) -> None:
    found = ask(client, span=3)
    load = {one["name"]: [value for _, value in one["points"]] for one in found["load"]}
    assert list(load) == ["version 2", "version 3", "tools", "rewards", "between calls"]
    width = 30 / BINS
    assert sum(load["version 2"]) * width == pytest.approx(6.0, rel=0.01)
    assert sum(load["tools"]) * width == pytest.approx(4.0, rel=0.01)
    assert sum(load["rewards"]) * width == pytest.approx(1.0, rel=0.01)
    assert max(load["version 2"]) == 2
    assert max(load["between calls"]) == 0


def test_groups_wait_from_their_last_episode_to_the_update(client: TestClient) -> None:
    """Group 2 ends at 10 s, and its update begins at 14 s; also in a window in which it makes no call."""
    waiting = ask(client, span=3)["waiting"]
    open_at = [x for x, value in waiting if value > 0.5]
    assert sum(10 < x < 14 for x in open_at) == pytest.approx(4 / 30 * BINS, abs=1)
    assert not [x for x in open_at if 14.1 < x < 19.9]
    alone = [value for _, value in ask(client, step=2, span=1)["waiting"]]
    assert sum(alone) * 10 / BINS == pytest.approx(4.0)


def test_the_timeline_has_failed_attempts(run: Writer, client: TestClient) -> None:
    turn = run.turn(0, None, PROMPT, "?", started=START + 21.0, seconds=5.0)
    lost = run.trajectory("g9", 0, [turn], None, outcome=Outcome.TIMEOUT, error="too late", seconds=5.0)
    run.files.append([lost], State.FAILED)
    [failed] = [one for one in ask(client, step=3, span=1)["episodes"] if one["kind"] == "failed"]
    assert (failed["outcome"], failed["calls"][0][:2]) == ("timeout", [1, 6])


def test_of_too_many_episodes_some_are_omitted_and_counted(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of step 1, which ended when it began, are read as well."""
    monkeypatch.setattr(timeline, "MOST_EPISODES", 3)
    found = ask(client, span=3)
    assert (len(found["episodes"]), found["omitted"]) == (1, 3)


def test_steps_without_times_and_unknown_ones(tmp_path: Path, client: TestClient) -> None:
    assert client.get("/api/timeline", params={"step": 77}).status_code == 404
    run = Writer(tmp_path / "new" / "run")
    run.metrics(0)
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as empty:
        refused = empty.get("/api/timeline")
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            "no step has been taken yet",
        )


def test_records_without_times_give_an_empty_timeline(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        found = ask(client)
        assert found["episodes"] == []
        assert len(found["trainer"]) == 6


def test_concurrency_is_exact() -> None:
    """One interval over a quarter of the window, one over all of it, and one outside."""
    values = concurrency([(0.0, 2.5), (-5.0, 20.0), (11.0, 12.0)], (0.0, 10.0))
    assert values[: BINS // 4] == pytest.approx(2.0)
    assert values[BINS // 4 :] == pytest.approx(1.0)
    assert float(np.sum(values)) * 10.0 / BINS == pytest.approx(12.5)
