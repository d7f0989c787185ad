"""Messages at the end of a run."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests import REPO
from tidegate.cli import main
from tidegate.config import Settings
from tidegate.launch import _report
from tidegate.program import program
from tidegate.settings.sections import dump
from tidegate.trainer import preflight
from tidegate.trainer.end import RunResult
from tidegate.viewer.live import make_view


def test_a_run_that_failed_before_it_began_is_started_again_not_resumed(tmp_path: Path) -> None:
    settings = Settings.model_validate({"run": {"dir": str(tmp_path), "name": "x"}, "model": {"path": "m"}})
    settings.run_dir.mkdir(parents=True)
    output = io.StringIO()
    view = make_view(True, 30, 2, Console(file=output, width=200))
    view.started({"name": "x", "dir": str(settings.run_dir)})

    _report(settings, view, RunResult("failed", "no engine", 0, {}, {}))
    assert (
        f"train from the start:\n    {program()} train {settings.run_dir}/config.toml\n" in output.getvalue()
    )
    assert "audit" not in output.getvalue()

    (settings.run_dir / "ledger.jsonl").touch()
    _report(settings, view, RunResult("failed", "no engine", 0, {}, {}))
    assert f"{settings.run_dir}/config.toml --resume\n" in output.getvalue()
    assert "audit" in output.getvalue()


@pytest.mark.parametrize(
    ("agent", "command"),
    [("solver", "init my-agent-2\n"), ("my.py:Mine", "train {}/config.toml --run.name x-3\n")],
)
def test_the_command_after_a_finished_run_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for taken in ("x", "x-2", "my-agent"):
        (tmp_path / taken).mkdir()
    words = {"run": {"dir": str(tmp_path), "name": "x"}, "model": {"path": "m"}, "agent": {"use": agent}}
    settings = Settings.model_validate(words)
    (settings.run_dir / "config.toml").write_text(dump(settings))
    (settings.run_dir / "ledger.jsonl").touch()
    output = io.StringIO()
    view = make_view(False, 30, 2, Console(file=output, width=200))
    view.started({"name": "x", "dir": str(settings.run_dir)})
    _report(settings, view, RunResult("completed", None, 30, {}, {}))
    said = output.getvalue()
    assert f"{program()} train {settings.run_dir}/config.toml --resume --trainer.steps 60\n" in said
    assert f"{program()} {command.format(settings.run_dir)}" in said

    _report(settings, view, RunResult("completed", "reached trainer.until = 0.9", 30, {}, {}))
    said = output.getvalue().removeprefix(said)
    assert "Completed: reached trainer.until = 0.9" in said
    assert "--resume" not in said, "there is nothing to resume"


@pytest.mark.parametrize("by", ["environment", "agent"])
def test_a_machine_without_bubblewrap_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(REPO)
    words = ["train", "examples/shell/config.toml"]
    if by == "agent":
        options = f'{{command = ["{sys.executable}"], sandbox = "bubblewrap"}}'
        words = ["train", "examples/demo/config.toml", "--agent.use=command", f"--agent.options={options}"]
    code = main([*words, f"--run.dir={tmp_path}", "--run.name=run"])
    said = capsys.readouterr().err
    assert (code, "no sandbox can be started: the program bwrap is not on the PATH" in said) == (3, True), (
        said
    )
    assert not (tmp_path / "run").exists(), "nothing was written"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "examples/demo/config.toml"],
        ["sft", "examples/demo/config.toml", "--then", "train"],
        ["serve", "examples/online/config.toml"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--trainer.publish_transport=broadcast"], "the trainer has NCCL 2.29.7, and engine.python"),
        (["--trainer.ranks=2"], "trainer.ranks = 2 and 1 engines need 2 + 1 × 1 GPUs"),
    ],
)
def test_gpus_and_nccl_are_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], given: list[str], said: str,
) -> None:  # fmt: skip
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho nvidia-nccl-cu13 2.30.7\n")
    python.chmod(0o755)
    own = SimpleNamespace(metadata={"Name": "nvidia-nccl-cu13"}, version="2.29.7")
    monkeypatch.setattr(preflight, "distributions", lambda: [own])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "")  # restored afterwards
    del os.environ["NCCL_CUMEM_ENABLE"]
    monkeypatch.chdir(REPO)
    engine = ["--engine.kind=sglang", f"--engine.python={python}", "--engine.max_slots=64"]
    place = ["--engine.max_context=1024", "--trainer.device=cuda", f"--run.dir={tmp_path}", "--run.name=run"]
    code = main([*words, *engine, *place, *given])
    assert (code, said in (err := capsys.readouterr().err)) == (2, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["python"]
    nccl = {"train": "0", "serve": "0"}.get(words[0])
    assert os.environ.get("NCCL_CUMEM_ENABLE") == nccl, "one value for trainer and engines, that of SGLang"
    os.environ["NCCL_CUMEM_ENABLE"] = "1"
    main([*words, *engine, *place, *given])
    assert os.environ["NCCL_CUMEM_ENABLE"] == "1"


def test_an_id_on_the_hub_is_answered_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", str(REPO / "examples/demo/config.toml"), "--model.path=Qwen/Qwen3-0.6B"]
    assert main(words) == 3
    assert "tidegate convert Qwen/Qwen3-0.6B --out models/Qwen3-0.6B, and set" in capsys.readouterr().err
