"""Search over episodes, and the solve rates of tasks and their kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_run import Writer, write_dashboard_run
from tidegate.evaluation.stats import wilson
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State, entry
from tidegate.types import Group, Outcome
from tidegate.viewer.dashboard import run as followed
from tidegate.viewer.dashboard import search
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.records import LONGEST_PROMPT, prompt_of
from tidegate.viewer.dashboard.run import FollowedRun


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    """Steps 1 to 3 with rewards 0 and 1, and step 4 with a group of its own rewards and prompts."""
    run = write_dashboard_run(tmp_path / "run")
    episodes = [
        run.simple("g4-own", slot, reward, messages=[{"role": "user", "content": text}], outcome=outcome)
        for slot, (reward, text, outcome) in enumerate(
            [
                (-0.5, "How  many\nPEARS?", Outcome.COMPLETED),
                (0.25, [{"type": "text", "text": "How many plums?"}], Outcome.TRUNCATED),
                (0.75, "x " * LONGEST_PROMPT + "at the end: quinces", Outcome.COMPLETED),
            ]
        )
    ]
    batch = Batch(4, [0], [Group("g4-own", "t", episodes)], [], 0.0, 0.0)
    batch.advantages = [[0.0, 0.0, 0.0]]
    run.files.batch(batch, 4)
    return run


@pytest.fixture
def client(run: Writer) -> Iterator[TestClient]:
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as found:
        yield found


def found(client: TestClient, **query: Any) -> list[tuple[int, str, int]]:
    """Step, group and slot of the episodes."""
    response = client.get("/api/episodes", params=query)
    assert response.status_code == 200, response.text
    return [(one["step"], one["group"], one["slot"]) for one in response.json()["episodes"]]


OWN = [(4, "g4-own", slot) for slot in range(3)]


def test_without_a_condition_all_episodes_of_the_newest_step_come_first(client: TestClient) -> None:
    answer = client.get("/api/episodes").json()
    steps = [4] * 3 + [3] * 6 + [2] * 6 + [1] * 6
    assert [one["step"] for one in answer["episodes"]] == [*steps, 0, 0]
    assert [one["kind"] for one in answer["episodes"]] == ["step"] * 21 + ["stale"] * 2
    assert (answer["searched"], answer["next"]) == (23, None)


@pytest.mark.parametrize(
    ("query", "slots"),
    [
        ({"low": 0.25}, [1, 2]),
        ({"high": 0.25}, [0, 1]),
        ({"low": 0, "high": 0.5}, [1]),
        ({"low": -1, "high": -0.1}, [0]),
        ({"outcome": "truncated"}, [1]),
        ({"outcome": ["truncated", "completed"]}, [0, 1, 2]),
        ({"outcome": "timeout"}, []),
        ({"text": "pears"}, [0]),
        ({"text": "how many p"}, [0, 1]),
        ({"text": "quinces"}, [2]),
        ({"task": "G4-own"}, [0, 1, 2]),
        ({"state": "stepped"}, [0, 1, 2]),
        ({"state": "filtered"}, []),
        ({"text": "pears", "low": 0}, []),
    ],
)
def test_each_condition(client: TestClient, query: dict[str, Any], slots: list[int]) -> None:
    assert [one for one in found(client, **query) if one[0] == 4] == [OWN[slot] for slot in slots]


def test_states_are_those_of_the_ledger(client: TestClient) -> None:
    assert {group for _, group, _ in found(client, state="trained")} == {"g1-good", "g2-good"}
    stale = {group for _, group, _ in found(client, state=["stale", "filtered"])}
    dropped = {f"g{step}-{name}" for step in (1, 2, 3) for name in ("alike", "old")}
    assert stale == {*dropped, "g3-late"}, "also what became stale before a batch"


def test_evaluations_and_failed_attempts(client: TestClient) -> None:
    evaluations = client.get("/api/episodes", params={"kind": "eval", "low": 1}).json()["episodes"]
    assert {(one["step"], one["state"]) for one in evaluations} == {(3, "eval")}
    failed = client.get("/api/episodes", params={"kind": "failed", "outcome": "agent_error"}).json()[
        "episodes"
    ]
    assert [(one["task"], one["step"], one["prompt"][:12]) for one in failed] == [
        ("task-g1-lost", 0, "What is 3 + "),
    ]  # fmt: skip


def test_a_search_goes_on_where_it_stopped(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of episodes, or when its time is up."""

    def all_pages(**query: Any) -> tuple[list[Any], int]:
        pages, where = [], {}
        while True:
            page = client.get("/api/episodes", params={**query, **where}).json()
            pages.append(page)
            if page["next"] is None:
                return [one for page in pages for one in page["episodes"]], len(pages)
            where = page["next"]

    whole = client.get("/api/episodes", params={"low": 1}).json()["episodes"]
    assert all_pages(low=1, most=2) == (whole, -(-len(whole) // 2))
    monkeypatch.setattr(search, "BUDGET_S", 0.0)
    monkeypatch.setattr(search, "LINES_BETWEEN_LOOKS", 5)
    assert all_pages(low=1) == (whole, 5)


def test_bad_queries_are_refused(client: TestClient) -> None:
    for query in ({"kind": "all"}, {"low": "much"}, {"most": 501}, {"text": "x" * 501}):
        assert client.get("/api/episodes", params=query).status_code == 422, query


def test_lists_have_a_piece_of_the_prompt(client: TestClient) -> None:
    groups = client.get("/api/groups", params={"step": 4}).json()["groups"]
    assert groups[0]["prompt"] == "How many PEARS?"
    compared = client.get("/api/compared", params={"before": 0, "after": 3}).json()["tasks"]
    assert compared[0]["prompt"].startswith("What is 3 + 4?")


@pytest.mark.parametrize(
    "record",
    [{}, {"messages": None}, {"messages": [{"role": "user"}, "x"]}, {"messages": [{"role": "system"}]}],
)
def test_a_record_without_a_prompt(record: dict[str, Any]) -> None:
    assert prompt_of(record) == ""


# ---------------------------------------------------------------- tasks


def issue(run: Writer, group: str, task: str, kind: str | None, **end: Any) -> None:
    more = {} if kind is None else {"task_kind": kind}
    run.ledger.record(
        entry("group", "issued", id=group, task=task, index=0, version=0, replaces=None, **more)
    )
    if end:
        run.ledger.record(entry("group", "ended", id=group, **end))


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[tuple[Writer, TestClient]]:
    run = Writer(tmp_path / "run")
    run.metrics(0)
    run.ledger.record(entry("run", "started", epoch=1, step=0, version=0, position=None))
    issue(run, "a1", "easy", "sum", state="filtered", solved=4, episodes=4)
    issue(run, "b1", "hard", "product", state="stepped", step=1, solved=1, episodes=4)
    issue(run, "a2", "easy", "sum", state="stepped", step=2, solved=3, episodes=4)
    issue(run, "c1", "lost", "sum", state="failed")
    issue(run, "d1", "open", None)
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        yield run, client


def test_solve_rates_of_tasks_and_kinds(judged: tuple[Writer, TestClient]) -> None:
    _, client = judged
    answer = client.get("/api/tasks").json()
    assert [(one["name"], one["rate"], one["groups"], one["step"]) for one in answer["tasks"]] == [
        ("hard", 0.25, 1, 1), ("easy", 0.875, 2, 2), ("lost", None, 1, None), ("open", None, 1, None),
    ]  # fmt: skip
    easy = answer["tasks"][1]
    assert (easy["solved"], easy["episodes"], easy["newest"]) == (7, 8, "a2")
    assert (easy["low"], easy["high"]) == pytest.approx(wilson(7, 8))
    assert easy["states"] == [["filtered", 1], ["stepped", 1]]
    kinds = {one["name"]: (one["groups"], one["solved"], one["episodes"]) for one in answer["kinds"]}
    assert kinds == {"sum": (3, 7, 8), "product": (1, 1, 4), "": (1, 0, 0)}
    assert (answer["total"], answer["all"]) == (4, 4)


def test_order_filter_and_pages_of_tasks(judged: tuple[Writer, TestClient]) -> None:
    _, client = judged

    def names(**query: Any) -> list[str]:
        return [one["name"] for one in client.get("/api/tasks", params=query).json()["tasks"]]

    assert names(sort="easiest")[:2] == ["easy", "hard"]
    assert names(sort="newest") == ["open", "lost", "hard", "easy"]
    assert names(sort="groups")[0] == "easy"
    assert names(text="EA") == ["easy"]
    assert names(kind="sum") == ["easy", "lost"]
    assert names(start=1, most=1) == ["easy"]


def test_the_chart_has_the_rate_of_each_step(judged: tuple[Writer, TestClient]) -> None:
    """Group a1 was filtered before the first step; the smoothed value of step 2 is (1 · 0.8 + 0.75) ÷ 1.8."""
    run, client = judged
    chart = client.get("/api/tasks").json()["chart"]
    assert [name for name, _, _ in chart["legend"]] == ["sum", "product"]
    assert '"points":[[1.0,1.0],[2.0,0.8611]]' in chart["data"]
    issue(run, "a3", "easy", "sum", state="stepped", step=3, solved=0, episodes=4)
    assert client.get("/api/tasks").json()["tasks"][1]["episodes"] == 12, "the page follows the ledger"


def test_a_ledger_without_solve_counts_has_no_rates(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        answer = client.get("/api/tasks").json()
        assert answer["chart"] is None
        assert {one["rate"] for one in answer["tasks"]} == {None}


def test_stale_episodes_of_batches_and_of_none_are_found_with_their_groups(client: TestClient) -> None:
    found = client.get("/api/episodes", params={"kind": "stale"}).json()
    assert [(one["group"], one["slot"], one["kind"], one["step"]) for one in found["episodes"]] == [
        *((f"g{step}-old", slot, "step", step) for step in (3, 2, 1) for slot in range(2)),
        ("g3-late", 0, "stale", 0), ("g3-late", 1, "stale", 0),
    ]  # fmt: skip
    assert {one["state"] for one in found["episodes"]} == {"stale"}
    rest = client.get("/api/episodes", params={"kind": "stale", "most": 7}).json()["next"]
    assert rest == {"step": 0, "line": 1}
    assert len(client.get("/api/episodes", params={"kind": "stale", **rest}).json()["episodes"]) == 1
    group = client.get("/api/group", params={"kind": "stale", "id": "g3-late"}).json()
    assert ([one["reward"] for one in group["members"]], group["state"]) == ([0.0, 1.0], "stale")
    one = client.get("/api/episode", params={"kind": "stale", "line": 1}).json()
    assert one["turns"][0]["reasons"] == [["stale", one["turns"][0]["sampled"]]]


def test_a_stale_group_has_its_versions_and_times(run: Writer) -> None:
    run.ledger.record(
        entry("group", "ended", id="g3-old", state="stale", version=5, oldest=1, newest=2, staleness=4)
    )
    late = [run.simple("g4-timed", slot, 1.0, seconds=2.0 + slot) for slot in range(2)]
    for episode in late:
        episode.turns[0].started = 1_700_000_000.0
    run.files.append(late, State.STALE)
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        group = client.get("/api/group", params={"kind": "step", "step": 3, "id": "g3-old"}).json()
        found = group["ledger"]
        assert (found["ended_version"], found["oldest"], found["staleness"]) == (5, 1, 4)
        assert abs(found["ended"] - time.time()) < 60
        assert group["finished"] is None, "older files have no times"
        timed = client.get("/api/group", params={"kind": "stale", "id": "g4-timed"}).json()
        assert timed["finished"] == 1_700_000_003.0
