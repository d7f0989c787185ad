"""The dashboard's server and a run that grows, ends, stops, is rolled back or replaced."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.viewer.dashboard_client import asking, client_of
from tests.unit.viewer.dashboard_run import Writer, write_dashboard_run, write_step
from tidegate.service.directory_lock import FILE as LOCK
from tidegate.trainer.ledger.entries import entry
from tidegate.viewer.dashboard.run import QUIET_S
from tidegate.viewer.report import write_report

pytestmark = pytest.mark.usefixtures("always_fresh")


def test_a_run_that_grows_is_followed(growing: Writer) -> None:
    with client_of(growing.dir) as client:
        ask = asking(client)
        before = ask("state")
        assert ask("state")["stamp"] == before["stamp"]
        assert ask("overview")["charts"][0]["data"].count("[3.0,") > 0
        write_step(growing, 4)
        with (growing.dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "ver')  # being written
        after = ask("state")
        assert (after["step"], after["version"]) == (4, 4)
        assert after["stamp"] != before["stamp"]
        assert [row["step"] for row in ask("steps")["steps"]] == [4, 3, 2, 1]
        assert ask("groups", step=4)["counts"] == {"stepped": 1, "filtered": 1, "stale": 1}
        assert ask("overview")["charts"][0]["data"].count("[4.0,") > 0
        growing.ledger.record(entry("run", "ended", step=4, version=4))
        assert ask("state")["status"] == "ended"


@pytest.mark.parametrize(
    ("status", "why", "said"),
    [
        ("failed", "no engine responds", "The run failed after step 3: no engine responds"),
        ("interrupted", None, "The run was interrupted after step 3; --resume continues it."),
        ("completed", "the target was reached", "The run completed: the target was reached."),
    ],
)
def test_the_end_of_a_run_is_shown_with_its_reason(
    growing: Writer, status: str, why: str | None, said: str
) -> None:
    growing.ledger.record(entry("run", "ended", step=3, version=3, status=status, why=why))
    with client_of(growing.dir) as client:
        ask = asking(client)
        assert (ask("state")["status"], ask("state")["why"]) == (status, why or "")
        assert said in ask("overview")["banners"]
    assert said in write_report(growing.dir).read_text()


def test_a_run_without_an_end_that_records_nothing_more_has_stopped(growing: Writer) -> None:
    long_ago = time.time() - 2 * QUIET_S
    for name in ("metrics.jsonl", "ledger.jsonl"):
        os.utime(growing.dir / name, (long_ago, long_ago))
    load = growing.dir / "load.jsonl"
    with client_of(growing.dir) as client:
        ask = asking(client)
        assert ask("state")["status"] == "quiet", "whether its trainer works is unknown"
        load.touch()
        assert ask("state")["status"] == "quiet", "its trainer works"
        os.utime(load, (long_ago, long_ago))
        assert ask("state")["status"] == "stopped"


def test_a_run_that_is_rolled_back_is_reported(growing: Writer) -> None:
    with client_of(growing.dir) as client:
        ask = asking(client)
        assert ask("groups", step=3)["groups"][0]["state"] == "stepped"
        marker = json.loads((growing.dir / "checkpoints" / "step_2" / "COMMITTED").read_text())
        growing.ledger.record(entry("run", "started", epoch=2, step=2, version=4, position=marker["ledger"]))
        growing.log.truncate_after(2)
        assert ask("state")["step"] == 2
        assert ask("groups", step=3)["groups"][0]["state"] == "abandoned"
        assert ask("episode", kind="step", step=3, line=0)["turns"][0]["reasons"] == [["abandoned", 80]]
        assert ask("groups", step=2)["groups"][0]["state"] == "trained"
        assert [one["step"] for one in ask("evaluations")["evaluations"]] == [0]


def test_another_run_in_the_same_directory(growing: Writer, tmp_path: Path) -> None:
    with client_of(growing.dir) as client:
        ask = asking(client)
        assert ask("state")["step"] == 3
        other = write_dashboard_run(tmp_path / "other" / "run")
        write_step(other, 4)
        config = other.dir / "config.toml"
        config.write_text(config.read_text().replace("steps = 4", "steps = 9").replace("small", "other"))
        shutil.rmtree(growing.dir)
        assert ask("state")["step"] is None
        other.dir.rename(growing.dir)
        assert (ask("state")["name"], ask("state")["step"], ask("state")["planned"]) == ("other", 4, 9)
        assert ask("groups", step=4)["counts"] == {"stepped": 1, "filtered": 1, "stale": 1}
        assert ask("overview")["books"]["issued"][0] == 13


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text("[run]\nname = 'new'\n")
    (run_dir / LOCK).touch()
    with client_of(run_dir) as client:
        ask = asking(client)
        assert (ask("state")["step"], ask("state")["status"]) == (None, "quiet")
        assert ask("overview")["reward"] is None
        assert ask("steps") == {"steps": [], "more": False}
        assert ask("evaluations") == {"evaluations": [], "names": {}, "kinds": [], "results": []}
        assert ask("failures")["episodes"] == []


def test_the_overview_has_the_signs_that_hold_and_those_that_ended(growing: Writer) -> None:
    """Steps 4 to 13 repeat themselves more than steps 1 to 3; those from step 40 on do not."""

    def write(steps: range, share: float) -> None:
        for step in steps:
            growing.metrics(step, **{"repetition/mean": share})

    with client_of(growing.dir) as client:
        ask = asking(client)
        write(range(4, 14), 0.1)
        assert ask("overview")["signs"] == []
        write(range(14, 40), 0.4)
        [sign] = ask("overview")["signs"]
        assert (sign["name"], sign["since"], sign["until"], sign["metric"]) == (
            "repetition", 23, 39, "repetition/mean",
        )  # fmt: skip
        assert sign["numbers"] == "share of repeated 4-grams 0.400 in steps 30–39, 0.100 in steps 4–13"
        write(range(40, 70), 0.1)
        found = ask("overview")
        assert not found["signs"]
        assert [(one["since"], one["until"]) for one in found["past_signs"]] == [(23, 44)]
