"""The report: one self-contained page that agrees with the files and escapes all text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.unit.viewer.test_charts_by_keyboard import PAGE
from tests.unit.viewer.viewer_run import text_of, write_run
from tidegate.errors import ConfigError
from tidegate.trainer.ledger.entries import entry
from tidegate.viewer.chart import MOST_POINTS, Series, lines, thinned, ticks
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.ledger import LedgerCounts, newest_checkpoint
from tidegate.viewer.report import write_report
from tidegate.viewer.run_files import lineage, read_run

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The page before its script has run: elements with their nesting checked, scripts, and the data."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []
        self.data: dict[str, Any] = json.loads(self.raw["application/json"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            self.raw[self.elements[-1][1].get("type") or self._open[-1]] = data

    @property
    def text(self) -> str:
        return text_of(self.data)

    def charts(self) -> dict[str, Any]:
        found = self.data["overview"]
        charts = [found["reward"], *found["charts"], *found["health"]]
        return {chart["title"]: json.loads(chart["data"]) for chart in charts}


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "demo", steps=100)
    return run_dir, report(run_dir)


def test_a_finished_run(finished: tuple[Path, Page]) -> None:
    run_dir, page = finished
    rows = metrics_of(run_dir)
    first, last = rows[0], rows[-1]
    score = page.data["overview"]["scores"][0]
    assert (score["before"], score["after"]) == (first["eval/reward"], last["eval/reward"])
    assert (score["name"], score["over"]) == ("held out, sampled", "over 200 problems")
    assert f"{first['eval/reward_greedy']:.3f} → {last['eval/reward_greedy']:.3f}" in page.text
    assert f"{first['eval/reward_unseen_templates']:.3f} → " in page.text
    assert "Held out: over 64 to 200 problems." in page.text
    assert "Steps 100 of 100" in page.text
    assert "Training time 3:10" in page.text
    assert f"{rows[-1]['tokens/sampled_total']:,}" in page.text
    assert "was interrupted" not in page.text
    assert [pair["task"] for pair in page.data["overview"]["chosen"]["pairs"]] == [
        "heldout-0", "heldout-1", "heldout-2",
    ]  # fmt: skip
    assert "not a fair sample" in page.text
    assert "straddles a publish" in page.text
    assert "tidegate train" in page.text
    assert f"--resume --trainer.steps {2 * 100}" in page.text
    assert f"tidegate engine --model.path {run_dir}/checkpoints/step_100" in page.text


DRAWN = """
const all = (one) => (one.children ? one.children.map(all).join(" ") : String(one));
console.log(all(main));
"""


def drawn(page: Page) -> str:
    """What the page's script makes of its data, as text."""
    if shutil.which("node") is None:
        pytest.skip("runs the script with node")
    data = json.dumps({"textContent": page.raw["application/json"]})
    found = f"const main = new Element(); document.getElementById = (id) => (id === 'data' ? {data} : main);"
    source = PAGE + found + page.raw["module"] + DRAWN
    command = ["node", "--input-type=module", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=True)
    return " ".join(done.stdout.split())


def test_the_script_shows_the_data(finished: tuple[Path, Page]) -> None:
    run_dir, page = finished
    first, last = (metrics_of(run_dir)[at]["eval/reward"] for at in (0, -1))
    shown = drawn(page)
    for text in (
        f"{first:.3f} → {last:.3f} mean reward, held out, sampled, over 200 problems",
        "Problem heldout-0 system Solve the problem.",
        "After reward 1.000 assistant calculator",
        "trained 1,600",
        "Next steps Train from the checkpoint tidegate train",
        "max_staleness 2",
        "Written 20",
    ):
        assert text in shown, shown


def test_the_charts_hold_the_run_s_numbers(finished: tuple[Path, Page]) -> None:
    run_dir, page = finished
    rows = metrics_of(run_dir)
    charts = page.charts()
    reward = {one["name"]: one["points"] for one in charts["Reward"]["series"]}
    assert reward["each batch"] == [
        [row["step"], pytest.approx(row["reward/mean"], rel=1e-3)] for row in rows[1:]
    ]
    evaluated = [row for row in rows if "eval/reward" in row]
    assert [point[0] for point in reward["held out, sampled"]] == [row["step"] for row in evaluated]
    staleness = {one["name"]: one["points"] for one in charts["Staleness"]["series"]}
    assert {y for _, y in staleness["bound"]} == {2}
    assert max(y for _, y in staleness["max"]) == 2
    groups = {one["name"]: one["points"][-1][1] for one in charts["Groups by state"]["series"]}
    assert groups["trained"] == 1600
    midway = charts["Groups by state"]["series"][0]["points"][39]
    assert midway == [40, 640]  # 400 behind a checkpoint, 240 stepped on since
    assert groups["stale"] == rows[-1]["groups/stale"]
    for name in ("Waiting times", "Tokens per second", "Mismatch KL", "Lag KL", "Entropy"):
        assert name in charts


def test_the_report_loads_nothing_from_elsewhere(finished: tuple[Path, Page]) -> None:
    """No address is loaded from anywhere, and the policy allows the page's own script and style alone."""
    _, page = finished
    assert not [attrs for _, attrs in page.elements if {"src", "href", "srcset", "style"} & set(attrs)]
    assert "url(" not in page.raw["style"]
    assert "@import" not in page.raw["style"]
    policy = next(
        a["content"] for tag, a in page.elements if tag == "meta" and "content" in a and "http-equiv" in a
    )
    assert policy is not None
    assert "import " not in page.raw["module"]
    for name, kind in (("script", "module"), ("style", "style")):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_reward_png(finished: tuple[Path, Page]) -> None:
    data = (finished[0] / "reward.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height) == (1440, 800)


def test_without_matplotlib_the_report_is_written_all_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    run_dir = write_run(tmp_path / "demo", steps=10)
    assert "Reward" in report(run_dir).charts()
    assert not (run_dir / "reward.png").exists()


OWN = "document.body.dataset.owned=1"
ATTACK = f'</script><script>{OWN}</script><img src=x onerror="{OWN}">\'"&'


def attacked_run(tmp_path: Path) -> Path:
    """A run in which every text that a model, an agent or a setting may give is an attack."""
    run_dir = write_run(tmp_path / "demo", steps=10)
    for path in (run_dir / "trajectories").glob("eval_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line |= {"task_id": ATTACK + line["task_id"], "outcome": ATTACK, "error": ATTACK}
            line["reward_parts"] = {ATTACK: 1.0, "b": 0.0}
            line |= {"output": ATTACK, "answer": {ATTACK: [ATTACK]}}
            for message in line["messages"]:
                message["content"] = f"{ATTACK} \x1b[2J {message['content']}"
                for call in message.get("tool_calls", []):
                    call["function"] = {"name": ATTACK, "arguments": ATTACK}
            line["messages"].insert(2, {"role": ATTACK, "content": ATTACK})
            line["turns"][0]["version_spans"] = [[ATTACK, 0, 3]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = (run_dir / "config.toml").read_text().replace('name = "demo"', f"name = {json.dumps(ATTACK)}")
    config += f"\n[agent.options]\n{json.dumps(ATTACK)} = {json.dumps(ATTACK)}\n"
    (run_dir / "config.toml").write_text(config)
    ledger = run_dir / "ledger.jsonl"
    bad = {"kind": "attempt", "event": "ended", "seq": 1, "state": "failed", "outcome": ATTACK, "why": ATTACK}
    attempt = json.loads(ledger.read_text().splitlines()[2])
    ledger.write_text(ledger.read_text() + json.dumps({**bad, "id": attempt["id"]}) + "\n")
    return run_dir


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    plain, attacked = report(write_run(tmp_path / "plain", steps=10)), report(attacked_run(tmp_path))
    assert {tag for tag, _ in attacked.elements} == {tag for tag, _ in plain.elements}
    assert [tag for tag, _ in attacked.elements].count("script") == 2
    assert not [name for _, attrs in attacked.elements for name in attrs if name.startswith("on")]
    assert attacked.text.count("document.body.dataset.owned") > 30
    assert "\x1b" not in attacked.text


def test_episodes_show_their_output_and_the_gold_answer(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=10)
    for path in (run_dir / "trajectories").glob("eval_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line | {"output": "about forty", "answer": ["forty-four"]} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = report(run_dir).data["overview"]["chosen"]["pairs"]
    assert len(pairs) == 3
    assert {pair["answer"] for pair in pairs} == {'["forty-four"]'}
    assert {one["output"] for pair in pairs for one in pair["episodes"]} == {"about forty"}


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=100, until=40)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "rew\n{"step": 41, "reward/me')
    with (run_dir / "ledger.jsonl").open("a") as file:
        file.write('{"seq": 99')
    page = report(run_dir)
    assert "This run has taken 40 of 100 steps" in page.text
    assert "1 line of metrics.jsonl is not valid JSON" in page.text
    assert "one evaluation only" in page.text
    assert "over 200, then 64 problems" in page.text
    assert "--resume" in page.text
    assert "--trainer.steps" not in page.text


@pytest.mark.parametrize(
    "kept", [["config.toml", ".tidegate.lock"], ["metrics.jsonl"], ["config.toml", "ledger.jsonl"]]
)
def test_a_run_that_has_hardly_begun(tmp_path: Path, kept: list[str]) -> None:
    run_dir = write_run(tmp_path / "demo", steps=10, until=3)
    (run_dir / ".tidegate.lock").touch()
    for path in run_dir.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = report(run_dir)
    assert "No evaluation has been written yet." in page.text
    if "metrics.jsonl" not in kept:
        assert "no completed step yet" in page.text


def test_settings_that_are_not_toml(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=5)
    (run_dir / "config.toml").write_text("[run\n")
    assert report(run_dir).text.count("Config.toml is not valid TOML") == 1


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such run directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_shows_the_steps_that_count(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=30)
    rows = metrics_of(run_dir)
    again = [{**row, "reward/mean": 0.125, "time": row["time"] + 7200} for row in rows[21:]]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in again)
    starts = [rows[0]["time"] - 1, rows[20]["time"] + 7000]
    with (run_dir / "ledger.jsonl").open("w") as file:
        for version, at in enumerate(starts):
            start = entry("run", "started", epoch=version + 1, step=20 * version, version=version)
            file.write(json.dumps({**start, "seq": version, "time": at}) + "\n")
    page = report(run_dir)
    batches = page.charts()["Reward"]["series"][0]["points"]
    assert [x for x, _ in batches] == list(range(1, 31))
    assert {y for _, y in batches[20:]} == {0.125}
    assert "was resumed once" in page.text
    assert "Training time 0:5" in page.text  # the two hours of standing still are not training


def test_a_standstill_is_shown_by_the_ledger_too(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=30)
    rows = metrics_of(run_dir)
    for row in rows[21:]:
        row["time"] += 7200
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(run_dir)
    assert run.seconds() == pytest.approx(30 * 1.9 + 7200)
    assert run.seconds([rows[20]["time"] + 7000]) == pytest.approx(29 * 1.9 + rows[21]["time/step"])


def test_keys_are_not_passed_on(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=5)
    with (run_dir / "config.toml").open("a") as file:
        file.write(
            '\n[gateway]\nadmin_key = "sesame"\n[agent.options]\napi_key = "sesame"\ntokens = "plenty"\n'
            '[engine]\narguments = ["--api-key", "sesame", "--hf-token=sesame", "--mem", "0.8"]\n'
            'urls = ["http://me:sesame@host:1"]\n'
        )
    source = write_report(run_dir).read_text()
    assert "sesame" not in source
    assert "(hidden)" in source
    for shown in ("plenty", "--api-key", "--hf-token=(hidden)", "--mem", "0.8", "http://(hidden)@host:1"):
        assert shown in source


def test_a_long_run_makes_a_small_page_quickly(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=10)
    row = metrics_of(run_dir)[-1]
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({**row, "step": step, "time": float(step)}) + "\n" for step in range(4000))
    began = time.process_time()
    path = write_report(run_dir)
    assert time.process_time() - began < 2.5
    assert path.stat().st_size < 1_000_000


# ---------------------------------------------------------------- the parts


def test_rows_of_one_step_become_one() -> None:
    raw = [
        {"step": 1, "loss": 1.0, "text": "x", "flag": True},
        {"step": 1, "eval/reward": 0.5},
        {"loss": 3},
        {"step": 2, "loss": float("inf")},
    ]
    assert lineage(iter(raw)) == [{"step": 1.0, "loss": 1.0, "eval/reward": 0.5}, {"step": 2.0}]


def counts_of(run_dir: Path) -> LedgerCounts | None:
    run = FollowedRun(run_dir)
    run.refresh()
    return run.counts()


def entries(*lines: dict[str, Any]) -> str:
    return "".join(
        json.dumps({"seq": seq, "time": float(seq), **line}) + "\n" for seq, line in enumerate(lines)
    )


def ending(name: str, state: str, kind: str = "group", **more: Any) -> Iterator[dict[str, Any]]:
    yield {"kind": kind, "event": "issued", "id": name, **more}
    yield {"kind": kind, "event": "ended", "id": name, "state": state, "staleness": 1}


def test_the_ledger_knows_which_groups_are_trained(tmp_path: Path) -> None:
    """A stepped group is trained once a marker lies behind it; what a resumption went back over is not."""
    ledger = entries(
        {"kind": "run", "event": "started", "position": None},
        *ending("a", "stepped"),
        *ending("a-0", "stepped", "attempt", group="a"),
        *ending("b", "stepped"),
        {"kind": "run", "event": "started", "position": 5},
        *ending("c", "stepped"),
        *ending("d", "stale"),
        {"kind": "group", "event": "issued", "id": "e"},
        {"kind": "run", "event": "publishing", "version": 3},
    )
    (tmp_path / "ledger.jsonl").write_text(ledger)
    for step, position in ((2, 5), (10, 10)):
        marker = tmp_path / "checkpoints" / f"step_{step}" / "COMMITTED"
        marker.parent.mkdir(parents=True)
        marker.write_text(json.dumps({"step": step, "ledger": position}))
    (tmp_path / "checkpoints" / "step_11").mkdir()  # its marker was never written
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_10"
    counts = counts_of(tmp_path)
    assert counts is not None
    assert counts.groups == {"trained": 2, "stepped": 1, "stale": 1, "live": 1}
    assert counts.attempts == {"trained": 1}
    assert counts.staleness == {1: 2}
    assert len(counts.starts) == 2


def test_a_restored_group_is_live_and_ends_once_more(tmp_path: Path) -> None:
    stepped = [*ending("b-0", "stepped", "attempt", group="b"), *ending("b", "stepped")]
    before = [{"kind": "run", "event": "started", "position": None}, *stepped]
    after = [
        {"kind": "run", "event": "started", "position": 1},
        {"kind": "group", "event": "put_back", "id": "b"},
    ]
    (tmp_path / "ledger.jsonl").write_text(entries(*before, *after))
    counts = counts_of(tmp_path)
    assert counts is not None
    assert (counts.groups, counts.attempts, counts.staleness) == ({"live": 1}, {"live": 1}, {})
    again = [one for one in stepped if one["event"] == "ended"]
    (tmp_path / "ledger.jsonl").write_text(entries(*before, *after, *again))
    marker = tmp_path / "checkpoints" / "step_2" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"ledger": 99}))
    counts = counts_of(tmp_path)
    assert counts is not None
    assert (counts.groups, counts.attempts, counts.staleness) == ({"trained": 1}, {"trained": 1}, {1: 1})


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 97) == [20, 40, 60, 80]
    assert ticks(-0.06, 0.05, 3) == pytest.approx([-0.05, 0, 0.05])


def test_thinning_keeps_peaks_where_they_matter() -> None:
    points = [(float(x), 9.0 if x == 5000 else 1.0) for x in range(10_000)]
    peak = thinned(Series("max", points, peak=True))
    assert len(peak.points) == MOST_POINTS
    assert max(y for _, y in peak.points) == 9.0
    assert max(y for _, y in thinned(Series("mean", points)).points) < 2.0
    assert peak.points[-1][0] == 9999


def test_charts_of_little_data() -> None:
    assert lines("x", [Series("a", [])]) is None
    assert lines("x", [Series("a", [(1, 2)])]) is None
    assert lines("x", [Series("a", [(1, 2)], form="dots")]) is not None
    assert lines("x", [Series("a", [(0, 0), (1, 0)])], stacked=True) is None
    pile = lines("x", [Series("a", [(0, 1), (1, 1)]), Series("b", [(0, 0), (1, 2)])], stacked=True)
    assert pile is not None
    assert [form for _, _, form in pile.legend] == ["area", "area"]


# ---------------------------------------------------------------- a real browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_in_a_browser_the_script_runs_and_no_text_does(tmp_path: Path) -> None:
    path = write_report(attacked_run(tmp_path))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--enable-logging=stderr",
        "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    dom = done.stdout
    assert "data-owned" not in re.sub(r'data-chart="[^"]*"', "", dom.split("<body", 1)[1].split(">", 1)[0])
    assert dom.count('class="tip"') == dom.count("data-chart=") > 10  # our own script ran
    for title in ("How it learned", "Episodes, before and after", "The ledger", "Next steps", "Settings"):
        assert f">{title}</h" in dom
    assert "Content Security Policy" not in done.stderr
    assert html.escape("<img src=x", quote=False) in dom


def test_signs_are_on_the_page_with_numbers_threshold_and_remedy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "repeated 4-grams" not in write_report(run).read_text()
    for row in rows:
        row["repetition/mean"] = 0.1 if row["step"] <= 20 else 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = drawn(report(run))
    for part in (
        "Repetition",
        "share of repeated 4-grams 0.500",
        "a rise of 0.15",
        "Read the longest episodes",
    ):
        assert part in text


def test_of_several_policies_the_report_has_the_reward_of_each(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "duo", steps=20)
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[1:]:
        row |= {"policy/solver/reward": 0.5, "policy/verifier/reward": 0.9, "policy/solver/entropy": 0.3}
    rows[-1]["eval/policy/solver/reward"] = 0.6
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    charts = report(run_dir).charts()
    names = [one["name"] for one in charts["Reward by policy"]["series"]]
    assert names == ["solver", "solver, held out", "verifier"]
    assert "policy/solver/entropy" in charts
