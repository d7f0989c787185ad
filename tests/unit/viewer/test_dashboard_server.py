"""The dashboard's server: its data about a run, and the requests it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_client import Ask, asking, client_of
from tests.unit.viewer.dashboard_run import EVIL, SECRET, Writer, write_dashboard_run
from tests.waiting import announced
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.evaluation.results import EvalResults
from tidegate.evaluation.sampler import SampledEpisode
from tidegate.service.directory_lock import DirectoryLock
from tidegate.service.local_only import is_loopback
from tidegate.types import Outcome, Task, Trajectory
from tidegate.viewer.dashboard.app import page_files
from tidegate.viewer.dashboard.run import FollowedRun

pytestmark = pytest.mark.usefixtures("always_fresh")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dashboard_run(tmp_path_factory.mktemp("small") / "run").dir


@pytest.fixture
def client(small: Path) -> Iterator[TestClient]:
    with client_of(small) as found:
        yield found


@pytest.fixture
def ask(client: TestClient) -> Ask:
    return asking(client)


def test_state(ask: Ask) -> None:
    state = ask("state")
    assert (state["name"], state["step"], state["planned"], state["version"]) == ("small", 3, 4, 3)
    assert (state["bound"], state["status"], state["failed"]) == (2, "running", True)


def test_overview(ask: Ask) -> None:
    found = ask("overview")
    assert (found["scores"][0]["before"], found["scores"][0]["after"]) == (0, 1)
    titles = [chart["title"] for chart in found["charts"]]
    assert titles == ["Staleness", "Waiting times", "Tokens per second", "Groups by state"]
    assert {"Entropy", "Lag KL", "Mismatch KL", "reward/exact_answer"} <= {
        chart["title"] for chart in found["health"]
    }
    states = {state: (groups, attempts) for state, groups, attempts in found["books"]["states"]}
    # The marker lies behind step 2; step 3 awaits the next checkpoint.
    assert states["trained"] == (2, 4)
    assert states["stepped"] == (1, 2)
    assert states["filtered"] == states["stale"] == (3, 6)
    assert states["live"] == (1, 0)
    assert states["failed"] == (0, 1)


def test_steps_come_newest_first_and_in_pages(ask: Ask) -> None:
    first = ask("steps", most=2)
    assert [row["step"] for row in first["steps"]] == [3, 2]
    assert first["more"]
    rest = ask("steps", most=2, before=2)
    assert [row["step"] for row in rest["steps"]] == [1]
    assert not rest["more"]
    assert rest["steps"][0]["reward"] == 0.25


def test_a_step_and_its_groups(ask: Ask) -> None:
    step = ask("step", step=2)
    assert (step["before"], step["after"], step["metrics"]["reward/mean"]) == (1, 3, 0.5)
    groups = ask("groups", step=2)
    assert groups["counts"] == {"trained": 1, "filtered": 1, "stale": 1}
    good, alike, old = groups["groups"]
    assert [one["reward"] for one in good["members"]] == [0, 1]
    assert (good["state"], good["staleness"], good["replaces"], good["mean"]) == ("trained", 1, "g1-old", 0.5)
    assert (alike["state"], old["state"]) == ("filtered", "stale")
    assert [one["id"] for one in ask("groups", step=2, state="stale")["groups"]] == ["g2-old"]
    assert ask("groups", step=3)["groups"][0]["state"] == "stepped"


def test_a_group(ask: Ask) -> None:
    group = ask("group", step=1, id="g1-old")
    assert group["ledger"]["replaced_by"] == "g2-good"
    assert (group["before"], group["after"]) == ("g1-alike", None)
    assert [one["slot"] for one in group["members"]] == [0, 1]


def test_an_episode_down_to_its_tokens(ask: Ask) -> None:
    one = ask("episode", kind="step", step=2, line=0)
    (turn,) = one["turns"]
    sampled = turn["sampled_tokens"]
    assert "".join(sampled["texts"]) == f"{EVIL} 水 🙂 is #### 9<|im_end|>"
    assert sampled["versions"][:6] == [1, 1, 1, 1, 1, 2]
    assert sampled["logprobs"][:3] == [0, -0.5, -1]
    assert turn["reasons"] == [["trained", len(sampled["ids"])]]
    assert (one["state"], one["reward"], one["advantage"]) == ("trained", 0, -0.7071)
    assert one["reward_parts"] == {"exact_answer": 0, "form": 1}


def test_an_episode_has_its_output_and_the_gold_answer(ask: Ask) -> None:
    for place in ({"kind": "step", "step": 2}, {"kind": "eval", "step": 3}, {"kind": "failed"}):
        one = ask("episode", line=0, **place)
        assert (one["output"], one["returned_last_reply"]) == ("#### 7", False)
        assert one["answer"] == f"7 {EVIL}"


def test_files_from_before_answers_were_recorded_are_read(growing: Writer) -> None:
    path = growing.files.directory / "step_000002.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        del line["answer"]
    lines[0]["output"], lines[1]["output"] = None, "x" * 20_001
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with client_of(growing.dir) as client:
        first, second = (asking(client)("episode", kind="step", step=2, line=line) for line in (0, 1))
    assert (first["answer"], first["output"]) == ("", None)
    assert second["output"] == "x" * 20_000 + " … (1 more characters)"


def test_why_tokens_were_not_trained(ask: Ask) -> None:
    one = ask("episode", kind="step", step=2, line=1)
    assert [turn["reasons"] for turn in one["turns"]] == [
        [["grammar", 1], ["trained", 4], ["grammar", 1]],
        [["undelivered", 4]],
        [["trained", 4]],
        [["trained", 5]],
    ]
    assert one["sequences"] == [{"turns": [0, 2], "own": [0, 2]}, {"turns": [0, 3], "own": [3]}]
    assert one["turns"][3]["branch"] == "the history was edited at message 2"
    for line, word in ((2, "filtered"), (4, "stale")):
        assert ask("episode", kind="step", step=2, line=line)["turns"][0]["reasons"] == [[word, 4]]
    assert ask("episode", kind="eval", step=3, line=0)["turns"][0]["reasons"] == [["eval", 4]]
    assert ask("episode", kind="failed", line=0)["turns"][0]["reasons"] == [["failed", 4]]


def test_many_tokens_come_in_pages(ask: Ask) -> None:
    one = ask("episode", kind="step", step=2, line=0, budget=10)
    sampled, given = one["turns"][0]["sampled_tokens"], one["turns"][0]["given_tokens"]
    assert (len(sampled["ids"]), sampled["total"], len(given["ids"]), given["total"]) == (10, 80, 0, 30)
    rest = ask("tokens", kind="step", step=2, line=0, turn=0, part="sampled", start=10, most=100)
    whole = ask("episode", kind="step", step=2, line=0)["turns"][0]["sampled_tokens"]
    for name in ("ids", "texts", "logprobs", "versions"):
        assert sampled[name] + rest[name] == whole[name]


def test_evaluations_before_and_after(ask: Ask) -> None:
    found = ask("evaluations")
    assert [one["step"] for one in found["evaluations"]] == [0, 3]
    assert found["kinds"] == [
        {"set": "", "mode": "sampled"},
        {"set": "unseen_templates", "mode": "sampled"},
        {"set": "", "mode": "greedy"},
    ]
    compared = ask("compared", before=0, after=3)
    assert (compared["better"], compared["same"], compared["worse"], compared["total"]) == (3, 0, 0, 3)
    row = ask("compared", before=0, after=3, set="unseen_templates", task="held_out-2")["tasks"]
    assert [(one["task"], one["gain"], one["after"]["line"]) for one in row] == [("held_out-2", 1, 8)]


def test_results_of_tidegate_eval_are_shown(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for name, text in (("1", "{"), ("3", '{"sets": {"main": 4}}'), ("4", "[]")):
        (run_dir / "evals" / name).mkdir(parents=True)
        (run_dir / "evals" / name / "results.json").write_text(text)
    tally = EvalResults(1.0, [1, 2])
    for sample, reward in enumerate((1.0, 0.0)):
        task = Task("t", "sums", [])
        ended = Trajectory("s", "t", "sums", "eval", Outcome.COMPLETED, [], reward=reward)
        tally.add(SampledEpisode("", task, sample, ended))
    results = {
        "status": "completed", "target": "runs/run/checkpoints/step_4", "agent": {"use": EVIL}, "samples": 2,
        "sampling": {"temperature": 0.5}, "sets": {"main": tally.summary("")},
    }  # fmt: skip
    (run_dir / "evals" / "2").mkdir()
    (run_dir / "evals" / "2" / "results.json").write_text(json.dumps(results))
    (run_dir / "metrics.jsonl").touch()
    with client_of(run_dir) as client:
        rows = {one["directory"]: one for one in asking(client)("evaluations")["results"]}
    empty, found = rows.pop("evals/3"), rows.pop("evals/2")
    assert not rows
    assert empty["reward"] == [None, None, None]
    shown = (found["target"], found["set"], found["temperature"], found["samples"])
    assert shown == ("step_4", "main", 0.5, 2)
    assert found["reward"][0] == found["pass"]["1"][0] == 0.5
    assert found["pass"]["2"][0] == 1.0


def test_failures_have_their_reasons(ask: Ask) -> None:
    found = ask("failures")
    assert (len(found["episodes"]), found["more"]) == (1, False)
    assert (found["episodes"][0]["outcome"], found["episodes"][0]["error"]) == (
        "agent_error",
        f"ValueError: {EVIL}",
    )
    assert found["reasons"] == [[f"ValueError: {EVIL}", 1]]
    assert found["quarantined"][0]["task"] == "task-g1-lost"


def test_settings_hold_no_secret(client: TestClient, ask: Ask) -> None:
    sections = {one["name"]: dict(one["rows"]) for one in ask("settings")["sections"]}
    assert sections["trainer"]["max_staleness"] == "2"
    assert sections["gateway"]["admin_key"] == "(hidden)"
    paths = [route.path for route in client.app.routes]  # type: ignore[attr-defined]
    for path in paths:
        assert SECRET not in client.get(path).text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/step?step=99", 404, "step 99"),
        ("/api/groups?step=99", 404, "step 99"),
        ("/api/group?step=1&id=nobody", 404, "'nobody'"),
        ("/api/episode?kind=step&step=1&line=600", 404, "there is no episode 600"),
        ("/api/episode?kind=step&step=1&line=-1", 422, "line"),
        ("/api/episode?kind=checkpoints&line=0", 422, "kind"),
        ("/api/episode?kind=step&step=1e3&line=0", 422, "step"),
        ("/api/episode?kind=step&step=99999999999999999999&line=0", 422, "step"),
        ("/api/tokens?kind=step&step=1&line=0&turn=7&part=given&start=0", 404, "no turn 7"),
        ("/api/steps?most=100000", 422, "most"),
        ("/api/nothing", 404, "/api/nothing"),
        ("/static/nothing.js", 404, "nothing.js"),
    ],
)  # fmt: skip
def test_refusals_are_sentences(client: TestClient, path: str, status: int, words: str) -> None:
    response = client.get(path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert words in response.json()["error"]["message"]


def test_only_get(client: TestClient) -> None:
    for method in ("post", "put", "delete", "patch", "options"):
        response = getattr(client, method)("/api/state")
        assert response.status_code == 405
        assert "the page is read-only" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["../report.py", "..%2f..%2fconfig.py", "%2e%2e/app.py", "/etc/passwd", "index.html%00.js"]
)
def test_no_path_leads_out_of_the_static_files(client: TestClient, small: Path, name: str) -> None:
    response = client.get(f"/static/{name}")
    assert response.status_code == 404
    assert "error" in response.json()


def test_the_page_is_its_own_and_nothing_else_is_allowed(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for name, content in page_files().items():
        response = client.get(f"/static/{name}")
        assert response.content == content
        assert response.headers["content-security-policy"] == policy
        text = content.decode()
        assert "innerHTML" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    assert '<script type="module" src="/static/app.js">' in page.text


def test_other_names_for_this_machine_are_refused(small: Path) -> None:
    with client_of(small) as client:
        response = client.get("/api/state", headers={"host": "evil.example:8080"})
        assert response.status_code == 400
        assert "evil.example" in response.json()["error"]["message"]
        for name in ("localhost:8080", "[::1]:8080", "127.0.0.1"):
            assert client.get("/api/state", headers={"host": name}).status_code == 200
    with client_of(small, host="0.0.0.0") as client:
        assert client.get("/api/state", headers={"host": "my-server:8080"}).status_code == 200


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.3.0.1", "::1", "[::1]", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.com", "localhost.example.com", "")))


def test_a_file_that_cannot_be_read(growing: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(growing.dir) as client:

        def broken(*_: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tidegate.viewer.dashboard.records.open", broken, raising=False)
        response = client.get("/api/groups?step=1")
        assert response.status_code == 503
        assert "Permission denied" in response.json()["error"]["message"]


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        FollowedRun(tmp_path / "gone")
    with pytest.raises(ConfigError, match="holds no run"):
        FollowedRun(tmp_path)


def test_a_run_that_is_about_to_start_is_waited_for_and_then_followed(tmp_path: Path, small: Path) -> None:
    """Its directory is locked, and the checks before its first file take seconds."""
    place = tmp_path / "soon"
    with DirectoryLock(place, "tidegate train"), client_of(place) as client:
        state = client.get("/api/state").json()
        assert (state["status"], state["step"]) == ("starting", None)
        assert client.get("/api/overview").json()["opening"].startswith("The run is starting")
        for name in ("config.toml", "metrics.jsonl", "ledger.jsonl"):
            shutil.copyfile(small / name, place / name)
        after = client.get("/api/state").json()
        assert (after["status"] != "starting", after["stamp"] != state["stamp"]) == (True, True)
        assert client.get("/api/overview").json()["opening"].startswith("Agent ")
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / ".tidegate.lock").touch()
    with pytest.raises(ConfigError, match="holds no run"):
        FollowedRun(tmp_path / "ended")


def test_the_verb_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err
    assert main(["view", "--dir", str(tmp_path)]) == 2
    assert f"no runs in {tmp_path}" in capsys.readouterr().err


def test_without_a_run_the_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_dashboard_run(tmp_path / "one" / "old").dir
    new = write_dashboard_run(tmp_path / "two" / "new").dir
    parent = tmp_path / "runs"
    parent.mkdir()
    for path, when in ((old, 1_700_000_000), (new, 1_800_000_000)):
        target = path.rename(parent / path.name)
        os.utime(target / "metrics.jsonl", (when, when))
    (parent / "no run").mkdir()
    assert main(["view", "--dir", str(parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["new", "old"]
    assert "0.000 → 1.000" in lines[1]
    assert lines[-2].endswith(f"tidegate view new --dir {parent}")
    assert lines[-1].endswith(f"tidegate view new old --dir {parent}")


def test_the_verb_serves_and_ends_with_its_owner(small: Path, tmp_path: Path) -> None:
    address = tmp_path / "address"
    command = [sys.executable, "-m", "tidegate", "view", small.name, "--dir", str(small.parent),
               "--port", "0", "--owned", "--announce", str(address)]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        url = announced(address, process)
        assert url in first
        with urllib.request.urlopen(f"{url}/api/state", timeout=20) as reply:
            assert json.load(reply)["name"] == "small"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_the_server_needs_no_torch(small: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from tidegate.viewer.dashboard.run import FollowedRun\n"
        "from tidegate.viewer.dashboard import app, views\n"
        f"run = FollowedRun(Path({str(small)!r}))\n"
        "shown = views.one_episode(run, kind='step', line=0, step=1, budget=100)\n"
        "assert shown['turns'][0]['sampled_tokens']['texts']\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
