"""The page of a standing service: the real server over the files of a run."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_client import Ask, asking, client_of
from tests.unit.viewer.dashboard_run import EVIL, write_dashboard_run
from tests.unit.viewer.service_run import ServiceWriter, write_many, write_service_run
from tests.unit.viewer.test_report import drawn, report
from tidegate.gateway.client import GroupRow
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.records.writer import FileWriter
from tidegate.viewer.dashboard import run as followed
from tidegate.viewer.dashboard import service as page
from tidegate.viewer.dashboard import tail
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


@pytest.fixture
def run(tmp_path: Path) -> ServiceWriter:
    return write_service_run(tmp_path / "run")


@pytest.fixture
def ask(run: ServiceWriter) -> Ask:
    return asking(client_of(run.dir))


def test_only_a_service_has_the_page(ask: Ask, tmp_path: Path) -> None:
    assert ask("state")["service"]
    assert ask("state")["planned"] is None, "a service has no last step unless it is given one"
    other = asking(client_of(write_dashboard_run(tmp_path / "local" / "run").dir))
    assert not other("state")["service"]


def test_conversations_by_key(ask: Ask) -> None:
    found = ask("service")
    assert found["columns"] == ["trained", "stale", "unrewarded", "refused"]
    rows = {row["name"]: (row["count"], row["ends"], row["reward"]["mean"]) for row in found["keys"]}
    assert rows == {"desk": (2, [0, 1, 0, 1], 0.75), "shop": (3, [2, 0, 1, 0], 0.5)}
    assert found["total"]["ends"] == [2, 1, 1, 1]
    assert found["refusals"] == [["stale: its oldest token is of version …", 1]]


def test_feedback_and_its_notes(ask: Ask) -> None:
    found = ask("service")
    names = {row["name"]: (row["count"], row["mean"], row["delays"]) for row in found["feedback"]}
    assert names["feedback"] == (3, pytest.approx(2 / 3), [2, 2, 2])
    assert names[EVIL] == (1, 0.5, [6, 6, 6])
    assert names["polite"] == (1, 0.25, None)
    assert (found["comments"], found["corrections"]) == (2, 1)
    late, noted = ask("notes")["notes"]
    assert (late["comment"], late["state"], late["step"], late["name"]) == ("late", "stale", 1, "x")
    assert (noted["comment"], noted["correction"]) == (f"unkind {EVIL}", f"better {EVIL}")
    assert (noted["value"], noted["turn"], noted["group"]) == (0, 0, "shop.noted")
    assert ask("episode", kind="step", step=1, line=noted["line"])["session"] == "s-shop.noted-0"


def test_an_erased_conversation_has_no_notes(run: ServiceWriter, ask: Ask) -> None:
    assert len(ask("notes")["notes"]) == 2
    run.ledger.record(entry("run", "erased", group="shop.noted"))
    asyncio.run(run.files.erase({"shop.noted"}, FileWriter()))
    assert [one["group"] for one in ask("notes")["notes"]] == ["desk.odd"]
    assert ask("service")["erased"] == 1


def test_versions_the_test_and_the_gate(run: ServiceWriter, ask: Ask) -> None:
    found = ask("service")
    assert [(one["version"], one["state"]) for one in found["versions"]] == [(2, "in test"), (1, "live")]
    assert (found["versions"][1]["rewards"]["count"], found["mixed"]["count"]) == (3, 1)
    promotion = found["promotion"]
    assert (promotion["mode"], promotion["in_test"], promotion["test"]["episodes"]) == ("canary", 2, 40)
    assert (promotion["test"]["low"], promotion["test"]["high"]) == (-0.2, 0.3)
    gate = found["gate"]
    assert (gate["publishes"], gate["waited"], gate["largest"], gate["waited_s"]) == (1, 1, 3, None)
    run.ledger.record(entry("run", "promoted", version=2, step=1, why="shown", reward=0.8, live_reward=0.75))
    late = run.conversation("shop.late", 1.0)
    run.take(late)
    run.train(2, [late], [])
    found = ask("service")
    assert found["versions"][0] | {"rewards": None} == {
        **found["versions"][0], "rewards": None, "state": "live", "why": "shown", "reward": 0.8,
    }  # fmt: skip
    assert (found["promotion"]["promoted"], found["promotion"]["in_test"], found["promotion"]["test"]) == (
        1,
        None,
        None,
    )
    assert 0 <= found["gate"]["waited_s"] < 60, "the publish after step 2 waits"
    damaged = run.conversation("shop.damaged", 1.0)
    run.take(damaged)
    run.ledger.record(entry("group", "ended", id=damaged.id, state="stepped", step="x"))
    assert ask("service")["gate"]["waited_s"] is None


def test_a_waiting_publish_is_looked_for_while_no_other_request_reads_new_lines(
    run: ServiceWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = FollowedRun(run.dir)

    def search(*_: object) -> None:
        with ThreadPoolExecutor() as other:
            assert not other.submit(shown.lock.acquire, blocking=False).result()

    monkeypatch.setattr(page, "publish_waits_since", search)
    page.service(shown)


def test_new_lines_are_shown_and_read_once(run: ServiceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    write_many(run.dir, 2000)
    read: list[int] = []

    def counting(line: bytes) -> object:
        read.append(len(line))
        return json.loads(line)

    monkeypatch.setattr(tail, "json_object", counting)
    ask = asking(client_of(run.dir))
    assert ask("service")["total"]["count"] == 2005
    assert len(read) > 4000
    before, stamp = len(read), ask("state")["stamp"]
    run.clients.ended([GroupRow("shop.more", "live", 1, [], client="shop", outcome="unrewarded")])
    assert ask("state")["stamp"] != stamp
    assert ask("service")["total"]["count"] == 2006
    assert len(read) == before + 1


def test_another_run_in_the_directory_starts_anew(run: ServiceWriter, ask: Ask) -> None:
    assert ask("service")["total"]["count"] == 5
    (run.dir / "clients.jsonl").write_text('{"group": "a.1", "client": "a", "state": "unrewarded"}\n')
    (run.dir / "ledger.jsonl").write_text("")
    found = ask("service")
    assert [(row["name"], row["count"]) for row in found["keys"]] == [("a", 1)]


def test_a_run_of_an_older_version_has_what_its_ledger_says(run: ServiceWriter, ask: Ask) -> None:
    (run.dir / "clients.jsonl").unlink()
    (run.dir / "canary.json").write_text("{")
    found = ask("service")
    assert [(row["name"], row["count"], row["reward"]["mean"]) for row in found["keys"]] == [
        ("desk", 1, None), ("shop", 2, None),
    ]  # fmt: skip
    assert (found["feedback"], found["rewards_chart"], found["promotion"]["test"]) == ([], None, None)


def test_texts_of_clients_are_data_in_the_page_and_in_the_report(run: ServiceWriter) -> None:
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        for view in ("service", "notes"):
            assert client.get(f"/api/{view}").headers["content-type"] == "application/json"
        script = client.get("/static/service.js").text
        assert "innerHTML" not in script
        assert "insertAdjacentHTML" not in script
    page = report(run.dir)
    assert EVIL in page.text, "the name is shown, as text"
    assert "unkind" not in page.text, "a comment, which its user may have erased"
    assert not [one for one in page.elements if one[0] == "img"]
    assert [attributes for tag, attributes in page.elements if tag == "script"] == [
        {"type": "application/json", "id": "data"}, {"type": "module"},
    ]  # fmt: skip
    shown = drawn(page)
    for text in (
        "Clients' conversations, starting from",
        "Conversations by project key",
        "Rewards by policy",
    ):
        assert text in shown
    assert "Episodes, before and after" not in shown
