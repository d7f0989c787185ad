"""A live run survives every second start that the command line allows."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, SMALL, ends, held, metrics, start_until_complete, training
from tests.e2e.test_train import tidegates
from tidegate.failpoints import PASSED, VARIABLE
from tidegate.gateway.project_keys import create_key

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)  # a run with its processes
def test_a_live_run_survives_every_second_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "live"
    place = [str(DEMO), f"--run.dir={tmp_path}", "--run.name=live"]
    with training(run_dir, "--trainer.steps=1000", "--trainer.checkpoint_every=1") as run:
        run.until_step(2)
        before = (run_dir.stat().st_ino, (run_dir / "config.toml").read_bytes())
        inside = str(run_dir / "checkpoints" / "step_1")
        starts = [
            ["train", *place, "--trainer.steps=5"],
            ["train", *place, "--resume", "--trainer.steps=5"],
            ["train", *place, "--resume", "auto", "--trainer.steps=5"],
            ["train", *place, "--fresh"],
            ["sft", *place, "--sft.chats=none.jsonl", "--then", "train", "--fresh"],
            ["eval", str(run_dir), "--out", str(run_dir)],
            ["eval", str(run_dir), "--out", inside],
            ["replay", str(run_dir), "--out", inside],
            ["export", str(run_dir), "--sft", "--out", str(run_dir / "metrics.jsonl")],
        ]
        keys = tmp_path / "keys.json"
        create_key(keys, "shop")
        service = ["serve", str(REPO / "examples" / "online" / "config.toml"), *place[1:]]
        starts += [[*service, f"--gateway.keys={keys}", *more] for more in ([], ["--fresh"])]
        for words, (code, said) in zip(starts, tidegates(*starts, torch=True), strict=True):
            holder = rf"in use by tidegate train \(process {run.process.pid} on .*, started \d{{4}}-"
            assert (code, re.search(holder, said) is not None) == (3, True), (words, code, said)
        assert (run_dir.stat().st_ino, (run_dir / "config.toml").read_bytes()) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "live", "live.out"]
        ((code, said),) = tidegates(["export", str(run_dir), "--sft"])
        assert code == 0, said
        run.until_step(metrics(run_dir)[-1]["step"] + 1)
        run.interrupt()
        assert run.wait(60) == 130, run.output()
    held(run_dir)
    assert ends(run_dir) == [("interrupted", None)]


@pytest.mark.timeout(600)
def test_a_run_that_was_killed_before_it_began_begins_at_the_next_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "early"
    passed = tmp_path / "passed"
    passed.mkdir()
    points = "config.before,config.after,ledger.run.started.before,ledger.run.started.after"
    environment = {**ENVIRONMENT, VARIABLE: points, PASSED: str(passed)}
    words = ["--resume", "auto", "--trainer.steps=1", "--eval.every=0"]
    place = [f"--run.dir={tmp_path}", "--run.name=early"]
    codes = start_until_complete(run_dir, "train", str(DEMO), *place, *SMALL, *words, environment=environment)
    assert codes == [-signal.SIGKILL] * 4 + [0]
    assert held(run_dir).steps == 1
