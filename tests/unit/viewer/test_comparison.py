"""Curves of any metric, and several runs on one page: their curves, final values and differing settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.viewer_run import CONFIG
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.viewer.dashboard import run as followed
from tidegate.viewer.dashboard.app import create_app, create_comparison
from tidegate.viewer.dashboard.comparison import MOST_RUNS, distinct_names
from tidegate.viewer.dashboard.curves import unit_of
from tidegate.viewer.dashboard.run import FollowedRun


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


def write_metrics(run_dir: Path, reward: float, steps: int = 30, config: str = "") -> Path:
    """Reward grows by a hundredth a step; 10 s and 100 tokens a step; evaluations at steps 0, 10, 20, …"""
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(CONFIG.format(steps=steps) + config)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            row: dict[str, Any] = {"step": step, "time": 1000.0 + 10 * step, "version": step}
            if step:
                row |= {
                    "reward/mean": reward + step / 100,
                    "tokens/sampled_total": 100.0 * step,
                    "time/step": 9.0,
                }
            if step % 10 == 0:
                row["eval/reward"] = reward + step / 50
            file.write(json.dumps(row) + "\n")
    return run_dir


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_metrics(tmp_path / "one", 0.2, config='learning_rate = 5e-4\n[trainer.loss]\nname = "dapo"\n'),
        write_metrics(tmp_path / "two", 0.4, 20, '[trainer.loss]\nname = "gspo"\nclip_high = 0.2\n'),
    ]


@pytest.fixture
def client(runs: list[Path]) -> Iterator[TestClient]:
    app = create_comparison([FollowedRun(path) for path in runs])
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as found:
        yield found


def ask(client: TestClient, path: str, **query: Any) -> Any:
    response = client.get(f"/api/{path}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_runs_have_their_names_and_states(client: TestClient) -> None:
    found = ask(client, "state")
    assert [(run["name"], run["step"], run["planned"]) for run in found["runs"]] == [
        ("one", 30, 30),
        ("two", 20, 20),
    ]


def test_metrics_of_all_runs_are_listed_with_their_newest_values(client: TestClient) -> None:
    found = {one["key"]: one["last"] for one in ask(client, "metrics")["metrics"]}
    assert found["reward/mean"] == [pytest.approx(0.5), pytest.approx(0.6)]
    assert set(found) == {"eval/reward", "reward/mean", "time/step", "tokens/sampled_total", "version"}


def test_a_curve_over_steps_tokens_and_hours(client: TestClient) -> None:
    found = ask(client, "curves", key=["reward/mean", "eval/reward"])
    assert (found["axis"], [curve["unit"] for curve in found["curves"]]) == (
        "step",
        ["reward", "reward"],
    )
    one, two = found["curves"][0]["runs"]
    assert (one[0], one[-1], len(one)) == ([1, pytest.approx(0.21)], [30, pytest.approx(0.5)], 30)
    assert two[-1] == [20, pytest.approx(0.6)]
    assert found["curves"][1]["runs"][1] == [[0, 0.4], [10, pytest.approx(0.6)], [20, pytest.approx(0.8)]]
    tokens = ask(client, "curves", key="reward/mean", x="tokens")
    assert tokens["curves"][0]["runs"][1][-1] == [2000, pytest.approx(0.6)]
    hours = ask(client, "curves", key="reward/mean", x="hours")
    assert hours["curves"][0]["runs"][0][-1] == [pytest.approx(300 / 3600), pytest.approx(0.5)]
    assert hours["axis"] == "hours"


def test_an_evaluation_before_the_first_tokens_has_no_place_among_them(client: TestClient) -> None:
    found = ask(client, "curves", key="eval/reward", x="tokens")
    assert [x for x, _ in found["curves"][0]["runs"][0]] == [1000, 2000, 3000]


def test_time_and_tokens_go_on_after_a_resume(tmp_path: Path) -> None:
    """Step 3 is taken again after a pause of an hour, and the count of tokens starts anew."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [(0, 0, None), (1, 10, 100), (2, 20, 200), (3, 30, 300), (3, 3630, 50), (4, 3640, 150)]
    with (run / "metrics.jsonl").open("w") as file:
        for step, at, tokens in [*rows[:4], (2, 20, 200), *rows[4:]]:
            row = {"step": step, "time": at, "time/step": 9.0, "loss": float(step)}
            file.write(json.dumps(row if tokens is None else {**row, "tokens/sampled_total": tokens}) + "\n")
    with TestClient(create_app(FollowedRun(run)), base_url="http://127.0.0.1") as client:
        found = ask(client, "curves", key="loss", x="tokens")
        assert found["curves"][0]["runs"] == [[[100, 1], [200, 2], [250, 3], [350, 4]]]


def test_a_metric_that_no_run_has_and_an_unknown_axis(client: TestClient) -> None:
    assert ask(client, "curves", key="nothing")["curves"][0]["runs"] == [[], []]
    assert client.get("/api/curves", params={"key": "loss", "x": "days"}).status_code == 422
    assert client.get("/api/curves").status_code == 422


def test_only_settings_that_differ_are_in_the_table(client: TestClient) -> None:
    found = ask(client, "differences")
    assert {row["key"]: row["values"] for row in found["rows"]} == {
        "trainer.steps": ["30", "20"],
        "trainer.learning_rate": ["0.0005", None],
        "trainer.loss.name": ["dapo", "gspo"],
        "trainer.loss.clip_high": [None, "0.2"],
    }
    assert found["total"] > len(found["rows"])


def test_the_names_of_runs_are_no_difference_and_secrets_are_hidden(tmp_path: Path) -> None:
    runs = [
        write_metrics(
            tmp_path / name / "demo", 0.2, config=f'[gateway]\nadmin_key = "sk-{name}"\nport = {port}\n'
        )
        for name, port in (("a", 1), ("b", 2))
    ]
    runs[1].joinpath("config.toml").write_text(
        runs[1].joinpath("config.toml").read_text().replace('name = "demo"', 'name = "other"')
    )
    app = create_comparison([FollowedRun(path) for path in runs])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert [run["name"] for run in ask(client, "state")["runs"]] == ["a/demo", "b/demo"]
        text = client.get("/api/differences").text
        assert [row["key"] for row in json.loads(text)["rows"]] == ["gateway.port"]
        assert "sk-" not in text


def test_final_values(client: TestClient) -> None:
    found = ask(client, "finals", key=["reward/mean", "eval/reward", "nothing"])
    assert (found["steps"], found["tokens"], found["seconds"]) == ([30, 20], [3000, 2000], [300, 200])
    values = {one["key"]: one["values"] for one in found["metrics"]}
    # The mean of steps 21 to 30 and 11 to 20; the newest evaluation.
    assert values["reward/mean"] == [pytest.approx(0.2 + 0.255), pytest.approx(0.4 + 0.155)]
    assert values["eval/reward"] == [pytest.approx(0.8), pytest.approx(0.8)]
    assert values["nothing"] == [None, None]


def test_each_run_has_its_own_pages_below_the_comparison(client: TestClient) -> None:
    assert "compare.js" in client.get("/").text
    assert "app.js" in client.get("/run/1/").text
    assert client.get("/run/1/api/state").json()["step"] == 20
    assert client.get("/static/compare.js").status_code == 200
    assert client.get("/run/2/api/state").status_code == 404
    refused = client.get("/run/0/api/state", headers={"host": "evil.example"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/runs/a", "/runs/b"], ["a", "b"]),
        (["/x/demo", "/y/demo"], ["x/demo", "y/demo"]),
        (["/x/runs/demo", "/y/runs/demo", "/y/runs/other"], ["x/runs/demo", "y/runs/demo", "y/runs/other"]),
        (["/x/\x1b[2J", "/x/b"], ["\ufffd[2J", "b"]),
    ],
)
def test_names_tell_runs_apart(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names


def test_units() -> None:
    keys = (
        "time/step",
        "length/p95",
        "reward/zero_variance_ratio",
        "reward/form",
        "lag_kl",
        "eval/reward_hard",
        "x",
    )
    assert [unit_of(key) for key in keys] == [
        "seconds", "tokens", "share", "reward", "nats per token", "reward", "",
    ]  # fmt: skip


def test_runs_that_are_named_twice_or_too_many_are_refused(runs: list[Path]) -> None:
    parent = runs[0].parent
    with pytest.raises(ConfigError, match="one is named twice"):
        _run(["view", "one", str(runs[0]), "--dir", str(parent)])
    for number in range(MOST_RUNS + 1):
        write_metrics(parent / f"r{number}", 0.1, 1)
    names = [f"r{number}" for number in range(MOST_RUNS + 1)]
    with pytest.raises(ConfigError, match="at most 12"):
        _run(["view", *names, "--dir", str(parent)])


def _run(arguments: list[str]) -> None:
    """Runs the verb without the handler that turns errors into messages."""
    from tidegate.cli import _parser

    parsed, rest = _parser().parse_known_args(arguments)
    parsed.run(parsed, rest)


def test_the_list_of_runs_says_how_to_compare(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--dir", str(runs[0].parent)]) == 0
    assert "tidegate view two one" in capsys.readouterr().out.replace("one two", "two one")
