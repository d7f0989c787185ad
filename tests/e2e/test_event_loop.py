"""The files that a run opens for writing, syncs or removes on its event loop, where a slow disk stops it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = """
import asyncio, os, sys
from tidegate.cli import main

notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_CREAT)

def note(what, path):
    if asyncio._get_running_loop() is not None:
        os.write(notes, f"{what} {path}\\n".encode())

def on_event(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        note("write", arguments[0])
    if event == "shutil.rmtree":
        note("remove", arguments[0])

def fsync(handle):
    note("sync", os.readlink(f"/proc/self/fd/{handle}"))
    sync(handle)

sync, os.fsync = os.fsync, fsync
sys.addaudithook(on_event)
sys.exit(main())
"""
AT_START = {"write .config.toml.partial", "write metrics.jsonl"}
AT_END = {"write .report.N.html", "write reward.png", "write .tidegate.lock"}  # the lock: opened, not written


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs procfs")
def test_files_of_episodes_and_weights_are_not_written_on_the_event_loop(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    place = [f"--run.dir={tmp_path}", "--run.name=run"]
    steps = ["--trainer.steps=5", "--eval.every=2", "--trainer.publish_full_every=1"]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), "train", str(DEMO), *place, *SMALL, *steps],
        cwd=REPO, env={**ENVIRONMENT, "NOTES": str(tmp_path / "notes"), "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name for path in (tmp_path / "run" / "trajectories").iterdir()}
    assert {"step_000005.jsonl", "eval_000004.jsonl"} <= written
    notes = (tmp_path / "notes").read_text().replace(f"{tmp_path / 'run'}{os.sep}", "RUN/")
    found = {re.sub(r"\d+", "N", line.replace("RUN/", "")) for line in notes.splitlines() if "RUN/" in line}
    assert found <= AT_START | AT_END
    assert found & AT_START, "the notes are of the event loop"
