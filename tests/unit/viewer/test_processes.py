"""The load of a run's processes, and the ends of their logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_run import EVIL, write_dashboard_run
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun

START = 1_700_000_000.0


def write_load(run_dir: Path) -> None:
    """Three samples, an hour's pause, and one without the engine; an engine's log, and an empty one."""
    both = {"trainer": {"cpu": 1.5, "memory": 2e9, "processes": 3}, "engine": {"cpu": 0.5, "memory": 1e9}}
    older = [(0.0, both), (6.0, both)]
    newer = [(12.0, both), (3612.0, {"trainer": {"cpu": 0.5, "memory": 1e9, "processes": 1}})]
    for name, samples in (("load.1.jsonl", older), ("load.jsonl", newer)):
        lines = [json.dumps({"time": START + at, "processes": sums}) + "\n" for at, sums in samples]
        (run_dir / name).write_text("".join([*lines, "not JSON\n", '{"time": 1']))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "engine.log").write_text("".join(f"line {number}\n" for number in range(9)) + EVIL)
    (run_dir / "logs" / "gateway.log").write_text("")
    (run_dir / "logs" / "link.log").symlink_to(run_dir / "config.toml")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    run_dir = write_dashboard_run(tmp_path / "run").dir
    write_load(run_dir)
    with TestClient(create_app(FollowedRun(run_dir)), base_url="http://127.0.0.1") as found:
        yield found


def ask(client: TestClient, path: str, **query: Any) -> dict[str, Any]:
    response = client.get(f"/api/{path}", params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_each_process_has_its_load_and_its_log(client: TestClient) -> None:
    found = ask(client, "processes")
    trainer, engine, gateway = found["processes"]
    assert (trainer["name"], trainer["log"], trainer["processes"]) == ("trainer", None, 1)
    assert (trainer["cpu"], trainer["cpu_mean"], trainer["cpu_peak"]) == (0.5, 1.25, 1.5)
    assert (trainer["memory"], trainer["memory_peak"]) == (1.0, 2.0)
    assert (engine["cpu"], engine["memory"], engine["cpu_peak"]) == (None, None, 0.5)
    assert gateway == {"name": "gateway", "log": 0}
    assert engine["log"] > 60


def test_a_pause_takes_no_room_in_the_charts(client: TestClient) -> None:
    cpu, memory = ask(client, "processes")["charts"]
    [trainer, engine] = json.loads(cpu["data"])["series"]
    assert trainer["points"] == [[0, 1.5], [0.1, 1.5], [0.2, 1.5], [0.2, 0.5]]
    assert len(engine["points"]) == 3
    assert json.loads(memory["data"])["axes"] == ["minutes of running", "GB"]


def test_the_end_of_a_log_begins_with_a_whole_line(client: TestClient) -> None:
    found = ask(client, "log", name="engine", most=len(EVIL) + 10)
    assert found["text"] == f"line 8\n{EVIL}"
    assert ask(client, "log", name="engine")["text"].startswith("line 0\n")


@pytest.mark.parametrize("name", ["../config", "link", "engine.log", ""])
def test_only_logs_of_the_list_are_read(client: TestClient, name: str) -> None:
    response = client.get("/api/log", params={"name": name})
    assert response.status_code == 404
    assert "has no log" in response.json()["error"]["message"]


def test_a_run_without_records(tmp_path: Path) -> None:
    run_dir = write_dashboard_run(tmp_path / "run").dir
    with TestClient(create_app(FollowedRun(run_dir)), base_url="http://127.0.0.1") as client:
        assert ask(client, "processes") == {"processes": [], "charts": []}
