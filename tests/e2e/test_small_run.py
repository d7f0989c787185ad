"""One small run: its files are documented, its event loop writes no large ones, and it is replayed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from docs.site.fields import with_fields
from tests.e2e.runs import DEMO, ENVIRONMENT, REPO, SMALL
from tidegate.cli import main
from tidegate.trainer.records.trajectories import read_lines, step_files

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

PAGE = with_fields((REPO / "docs" / "formats.md").read_text(encoding="utf-8"))
MODEL = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""Files in Hugging Face format that the page calls the tokenizer's."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps; `notes` beside it has what its event loop wrote."""
    parent = tmp_path_factory.mktemp("small")
    (parent / "script.py").write_text(SCRIPT)
    place = [f"--run.dir={parent}", "--run.name=run"]
    steps = ["--trainer.steps=4", "--eval.every=2", "--trainer.publish_full_every=1"]
    done = subprocess.run(
        [sys.executable, str(parent / "script.py"), "train", str(DEMO), *place, *SMALL, *steps],
        cwd=REPO, env={**ENVIRONMENT, "NOTES": str(parent / "notes"), "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return parent / "run"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs procfs")
def test_files_of_episodes_and_weights_are_not_written_on_the_event_loop(run: Path) -> None:
    """There a slow disk would stop the run."""
    written = {path.name for path in (run / "trajectories").iterdir()}
    assert {"step_000004.jsonl", "eval_000002.jsonl"} <= written
    notes = (run.parent / "notes").read_text().replace(f"{run}{os.sep}", "RUN/")
    found = {re.sub(r"\d+", "N", line.replace("RUN/", "")) for line in notes.splitlines() if "RUN/" in line}
    assert found <= AT_START | AT_END
    assert found & AT_START, "the notes are of the event loop"


def lines(path: Path) -> Iterator[dict[str, object]]:
    return map(json.loads, path.read_text().splitlines())


def documented(name: str) -> bool:
    return f"`{name}`" in PAGE


def test_each_file_and_field_of_a_run_is_documented(run: Path) -> None:
    names = {re.sub(r"\d{2,}|(?<=step_)\d", "N", str(one.relative_to(run))) for one in files(run)}
    known = {name for name in names if any(documented(part) for part in shown(name))}
    assert sorted(names - known) == []
    found = set()
    for path in [*run.glob("trajectories/*.jsonl"), run / "ledger.jsonl"]:
        for line in lines(path):
            found |= line.keys()
            for part in ("turns", "tool_calls"):
                found |= {key for one in line.get(part, ()) for key in one}  # type: ignore[attr-defined]
    for marker in run.glob("checkpoints/step_*/COMMITTED"):
        found |= json.loads(marker.read_text()).keys()
    for line in lines(run / "load.jsonl") if (run / "load.jsonl").exists() else ():
        found |= line.keys()
        found |= {key for one in line["processes"].values() for key in one}  # type: ignore[attr-defined]
    assert {"output_ids", "event", "cursor"} <= found
    assert sorted(name for name in found if not documented(name)) == []


def files(run: Path) -> list[Path]:
    return [one for one in run.rglob("*") if one.is_file() and one.name not in MODEL]


def shown(name: str) -> list[str]:
    """The ways in which the page may name a file: its path, its name, or the pattern of its folder."""
    path = Path(name)
    folder = path.parts[0]
    by_step = {"step_N.jsonl": "trajectories/step_000040.jsonl", "eval_N.jsonl": "eval_000040.jsonl"}
    of_process = f"{folder}/NAME{path.suffix}" if folder == "logs" else name
    return [name, path.name, by_step.get(path.name, name), of_process, of_process.replace("NAME", "*")]


def test_replay_is_the_run_again_and_sees_what_was_changed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(run, run_dir)
    assert main(["replay", str(run_dir), "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in steps] == [1, 2, 3, 4]
    assert all(one["same"] for one in steps)
    assert [one["same_weights"] for one in steps] == [None, True, None, True]

    assert main(["replay", str(run_dir), "--from", "2", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [3, 4]

    what_if = ["--trainer.learning_rate=1e-3", "--until", "2", "--json", "--out", str(tmp_path / "w")]
    assert main(["replay", str(run_dir), *what_if]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["now"]["loss"] == first["before"]["loss"]
    assert second["now"]["loss"] != second["before"]["loss"]
    assert (tmp_path / "w" / "model.safetensors").exists()

    nudge(step_files(run_dir)[1])
    assert main(["replay", str(run_dir)]) == 1
    assert "steps [1, 2, 3, 4] differ" in capsys.readouterr().out
    assert main(["replay", str(run_dir), "--from", "3"]) != 0
    assert "can start from 0, 2, 4" in capsys.readouterr().err


def nudge(path: Path) -> None:
    """Changes one recorded logprob of a trained episode."""
    lines = list(read_lines(path))
    trained = next(line for line in lines if line["state"] == "stepped" and line["advantage"])
    trained["turns"][0]["logprobs"][0] -= 0.5
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
