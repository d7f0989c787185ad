"""Pages of failed and stale episodes in several parts; a page reads only the parts that it shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_client import Ask, asking
from tests.unit.viewer.dashboard_run import PROMPT, Writer
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Outcome
from tidegate.viewer.dashboard import records, search
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.records import PART_LINES, RecordFile
from tidegate.viewer.dashboard.run import FollowedRun

pytestmark = pytest.mark.usefixtures("always_fresh")

START = 1_700_000_000.0
PARTS = 5


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    """A step of 10 s, and files of failed and stale episodes with two episodes in each of PARTS parts."""
    run = Writer(tmp_path / "run")
    run.metrics(1, time=START + 10, **{"time/step": 10.0})
    files = TrajectoryFiles(run.dir, part_bytes=1)
    for part in range(1, PARTS + 1):
        turn = run.turn(0, None, PROMPT, "?", started=START + part, seconds=0.5)
        lost = [
            run.trajectory(f"g{part}-lost", slot, [turn], None, outcome=Outcome.TIMEOUT) for slot in range(2)
        ]
        files.append(lost, State.FAILED)
        late = [run.trajectory(f"g{part}-late", slot, [turn], float(slot)) for slot in range(2)]
        files.append(late, State.STALE)
    assert (run.dir / "trajectories" / f"failed.{PARTS}.jsonl").exists()
    return run


@pytest.fixture
def followed(run: Writer) -> FollowedRun:
    return FollowedRun(run.dir)


@pytest.fixture
def ask(followed: FollowedRun) -> Iterator[Ask]:
    with TestClient(create_app(followed), base_url="http://127.0.0.1") as client:
        yield asking(client)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read, in order."""
    names: list[str] = []
    refresh = RecordFile.refresh

    def noted(file: RecordFile) -> None:
        names.append(file.path.name)
        refresh(file)

    monkeypatch.setattr(RecordFile, "refresh", noted)
    return names


def lines(part: int) -> list[int]:
    return [PART_LINES * (part - 1), PART_LINES * (part - 1) + 1]


def test_failures_are_read_from_the_newest_part_backwards(ask: Ask, read: list[str]) -> None:
    page = ask("failures", most=3)
    assert [one["line"] for one in page["episodes"]] == [*lines(5)[::-1], lines(4)[1]]
    assert (page["more"], read) == (True, ["failed.5.jsonl", "failed.4.jsonl"])
    found = page["episodes"]
    while page["more"]:
        read.clear()
        page = ask("failures", most=3, before=found[-1]["line"])
        found += page["episodes"]
        assert len(read) <= 3
    assert [one["line"] for one in found] == [at for part in range(5, 0, -1) for at in lines(part)[::-1]]
    assert ask("failures", most=2, before=2)["more"] is False
    oldest = ask("episode", kind="failed", line=found[-1]["line"])
    assert (oldest["group"], oldest["slot"]) == ("g1-lost", 0)


@pytest.mark.parametrize(("kind", "name"), [("failed", "lost"), ("stale", "late")])
@pytest.mark.parametrize("most", [1, 2, 3, 500])
def test_a_search_finds_the_episodes_of_all_parts(ask: Ask, kind: str, name: str, most: int) -> None:
    found, where, pages = [], {}, 0
    while where is not None:
        page = ask("episodes", kind=kind, most=most, **where)
        found += page["episodes"]
        where, pages = page["next"], pages + 1
    assert [(one["group"], one["line"], one["step"], one["kind"]) for one in found] == [
        (f"g{part}-{name}", at, 0, kind) for part in range(1, PARTS + 1) for at in lines(part)
    ]
    assert pages == -(-10 // most)


def test_a_search_goes_on_in_the_part_where_it_stopped(
    ask: Ask, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "BUDGET_S", 0.0)
    monkeypatch.setattr(search, "LINES_BETWEEN_LOOKS", 3)
    page = ask("episodes", kind="step", task="nothing")
    assert page["next"] == {"step": 0, "line": lines(2)[1]}
    assert read == ["stale.jsonl", "stale.2.jsonl"]
    read.clear()
    page = ask("episodes", kind="step", task="nothing", **page["next"])
    assert (page["next"]["line"], read) == (lines(4)[0], ["stale.2.jsonl", "stale.3.jsonl", "stale.4.jsonl"])


def test_a_stale_group_of_any_part_can_be_opened(ask: Ask, followed: FollowedRun) -> None:
    for part in range(1, PARTS + 1):
        group = ask("group", kind="stale", id=f"g{part}-late")
        assert [one["line"] for one in group["members"]] == lines(part)
        for slot, line in enumerate(lines(part)):
            found = followed.records.read("stale", 0, line)[1]
            assert (found["group_id"], found["slot"]) == (f"g{part}-late", slot)


def test_unknown_stale_groups_are_refused(followed: FollowedRun, tmp_path: Path) -> None:
    empty = Writer(tmp_path / "empty")
    for directory, why in ((followed.dir, "no group 'g9'"), (empty.dir, "the run has no stale episodes")):
        with TestClient(create_app(FollowedRun(directory)), base_url="http://127.0.0.1") as client:
            response = client.get("/api/group", params={"kind": "stale", "id": "g9"})
            assert response.status_code == 404
            assert why in response.json()["error"]["message"]


def test_the_page_is_renewed_when_another_part_grows(run: Writer, ask: Ask) -> None:
    before = ask("state")
    assert before["failed"]
    files = TrajectoryFiles(run.dir, part_bytes=1)
    files.append([run.simple("new", 0, None, outcome=Outcome.TIMEOUT)], State.FAILED)
    assert ask("state")["stamp"] != before["stamp"]
    assert ask("failures")["episodes"][0]["line"] == lines(PARTS + 1)[0]


def test_the_timeline_has_the_episodes_of_all_parts_that_were_written_since(
    run: Writer, ask: Ask, read: list[str]
) -> None:
    def shown() -> list[tuple[str, int]]:
        found = ask("timeline", step=1, span=1)["episodes"]
        assert {one["step"] for one in found} == {0}
        return sorted((one["kind"], one["line"]) for one in found)

    assert shown() == [
        (kind, at) for kind in ("failed", "stale") for part in range(1, PARTS + 1) for at in lines(part)
    ]
    for part in ("failed.jsonl", "stale.jsonl", "stale.2.jsonl"):
        os.utime(run.dir / "trajectories" / part, (START - 100, START - 100))
    read.clear()
    assert [one for one in shown() if one[0] == "stale"] == [
        ("stale", at) for part in (3, 4, 5) for at in lines(part)
    ]
    assert [name for name in read if name.startswith("failed")] == [f"failed.{n}.jsonl" for n in range(2, 6)]


def test_the_memory_for_parts_is_bounded(followed: FollowedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_SUMMARIES", 5)

    def everything() -> list[Any]:
        found = []
        for part in followed.records.numbers("failed"):
            found += followed.records.file("failed", part).summaries
            assert followed.records._indexed() <= 5
        return found

    assert everything() == everything()
    assert len(everything()) == 2 * PARTS
