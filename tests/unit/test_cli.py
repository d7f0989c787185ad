"""The command line: announced addresses, and messages about mistyped words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.tiny_tokenizer import make_model_dir
from tidegate.cli import COMMANDS, main
from tidegate.envs.service.pool import PoolSettings


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code, and what a person reads."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    read = capsys.readouterr()
    return code, read.out + read.err


@pytest.mark.parametrize(
    ("words", "nearest"), [(["trian"], "'train'"), (["rag", "biuld"], "'build'"), (["evals"], "'eval'")]
)
def test_a_mistyped_verb_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], nearest: str
) -> None:
    code, text = said(capsys, *words)
    assert (code, f"did you mean {nearest}?" in text) == (2, True), text


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["train", "x.toml", "--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        (["train", "x.toml", "--dry_run"], "unknown option --dry_run; did you mean --dry-run?"),
        (["train", "x.toml", "-dry-run"], "unknown option -dry-run; did you mean --dry-run?"),
        (["train", "--Freshh", "--run.name=a", "x.toml"], "unknown option --Freshh; did you mean --fresh?"),
        (["train", "--clustr=auto", "x.toml"], "unknown option --clustr; did you mean --cluster?"),
        (["keys", "create", "shop", "--fil", "k"], "unknown option --fil; did you mean --file?"),
        (["eval", "--gredy"], "unknown option --gredy; did you mean --greedy?"),
        (
            ["train", "x.toml", "--verbose", "--run.dir", "y"],
            "there is no setting 'verbose'; settings are written as",
        ),
        (["train", "x.toml", "y.toml"], "expected one settings file, not x.toml and y.toml"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], nearest: str
) -> None:
    code, text = said(capsys, *words)
    assert (code, nearest in text) == (2, True), text


@pytest.mark.parametrize("verb", ["view", "audit", "tasks", "report", "eval", "replay", "export"])
def test_a_mistyped_run_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    more = ["--sft"] if verb == "export" else []
    for typed, nearest in (("dmeo", "'demo'"), ("runs/deom", "'runs/demo'")):
        code, text = said(capsys, verb, typed, *more)
        assert (code, f"did you mean {nearest}?" in text) == (2, True), text
    code, text = said(capsys, verb, "demo", *more)  # it is found by its name: the run in it is not there
    assert code != 0
    assert "runs/demo" in text


@pytest.mark.parametrize("verb", ["view", "audit", "tasks", "report", "replay", "export", "versions list"])
def test_a_directory_without_a_run_is_named_with_what_a_run_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A project's directory has a config.toml, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text("[model]\npath = 'm'\n")
    words = [*verb.split(), ".", *(["--sft"] if verb == "export" else [])]
    holds = f"{tmp_path} holds no run: a run's directory, such as runs/NAME, has config.toml, metrics.jsonl"
    code, text = said(capsys, *words)
    assert (code, holds in text, text.count("\n")) == (2, True, 1), text
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "ledger.jsonl").touch()
    code, text = said(capsys, *words)
    assert (code, text.endswith("; did you mean runs/demo?\n")) == (2, True), text
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.toml", "runs"]
    code, text = said(capsys, *[word.replace(".", "config.toml") for word in words])
    assert (code, "config.toml is a file; name the run's directory" in text) == (2, True), text


def test_a_terminal_that_cannot_encode_a_character_shows_another() -> None:
    """`--settings` has a root sign, which latin-1 lacks."""
    run = subprocess.run(
        [sys.executable, "-m", "tidegate", "train", "--settings"],
        capture_output=True,
        encoding="latin-1",
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "trainer.ess_scaling" in run.stdout


def test_a_notebooks_plot_backend_is_not_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    said(capsys, "report", "nothing")
    assert "MPLBACKEND" not in os.environ


def test_a_command_lists_the_settings_that_it_reads_and_refuses_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb, own, other in (
        ("train", "trainer.steps", "limits.turns"),
        ("sft", "sft.chats", "limits.turns"),
        ("gateway", "limits.turns", "trainer.steps"),
        ("engine", "engine.max_slots", "engine.python"),
        ("vllm", "engine.python", "engine.max_slots"),
        ("simulate", "engine.slots", "engine.max_slots"),
    ):
        code, text = said(capsys, verb, "--settings")
        assert (code, own in text, other in text) == (0, True, False)
        code, text = said(capsys, verb, f"--{other}=3")
        assert (code, f"there is no setting '{other.partition('.')[0]}" in text) == (2, True), text


@pytest.mark.parametrize(
    "words", [["--env.use", "harbor", "--env.workers", "2"], ["--env.workers", "2", "harbor"]]
)
def test_an_environment_to_serve_is_a_word_or_a_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    served: list[PoolSettings] = []
    monkeypatch.setattr("tidegate.service.process_secrets.shield_process", lambda: None)
    monkeypatch.setattr("tidegate.envs.service.server.serve", lambda given, *_: served.append(given))
    assert main(["env", "serve", *words]) == 0
    assert (served[0].environment["use"], served[0].workers) == ("harbor", 2)
    code, text = said(capsys, "env", "serve", *[word.replace("harbor", "harbr") for word in words])
    assert (code, text.count("\n"), "did you mean 'harbor'?" in text) == (2, 1, True), text
    code, text = said(capsys, "env", "serve", "harbor", "gsm8k")
    assert (code, text) == (2, "tidegate: expected one environment, not harbor and gsm8k\n")


@pytest.mark.parametrize(
    ("verb", "option", "answer"),
    [
        ("gateway", "--tool-parser", "did you mean 'gateway.tool_parser'?"),
        ("gateway", "--engine", "engine is a section, not a value; its settings are engine.urls"),
        ("gateway", "--limit", "did you mean 'limits'?"),
        ("engine", "--max-slots", "did you mean 'engine.max_slots'?"),
        ("engine", "--model", "model is a section, not a value; its settings are model.path"),
        ("vllm", "--argument", "did you mean 'engine.arguments'?"),
        ("doctor", "--agent", "agent is a section, not a value; its settings are agent.source, agent.use, "),
    ],
)
def test_an_option_without_its_section_is_refused_with_the_setting(
    capsys: pytest.CaptureFixture[str], verb: str, option: str, answer: str
) -> None:
    code, text = said(capsys, verb, option, "x")
    assert (code, answer in text) == (2, True), text


def test_flags_that_are_for_programs_stand_in_no_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in COMMANDS:
        name = verb.replace("evaluate", "eval")
        _, text = said(capsys, *(["rag", "serve"] if name == "rag" else [name]), "--help")
        assert "usage: tidegate" in text
        assert not re.search(r"--(announce|owned|fd|shard)\b", text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gateway", "http://g:1", "--options", "[]"], "--options [] is not a JSON object"),
        (["--gateway", "g:8000"], "--gateway g:8000: not a URL with scheme and host"),
    ],
)
def test_a_worker_refuses_what_it_cannot_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    async def serve(*_: object, **__: object) -> None:
        raise AssertionError("the worker started")

    monkeypatch.setattr("tidegate.agents.attempt_runner.serve", serve)
    monkeypatch.setenv("TIDEGATE_WORKER_KEY", "secret")
    code, text = said(capsys, "worker", "--agent", "solver", *words)
    assert (code, why in text) == (2, True), text


def test_the_list_of_runs_names_commands_that_find_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("one", "a two"):
        (tmp_path / "my runs" / name).mkdir(parents=True)
        (tmp_path / "my runs" / name / "metrics.jsonl").write_text('{"step": 1}\n')
    code, text = said(capsys, "view", "--dir", str(tmp_path / "my runs"))
    assert code == 0
    assert "tidegate view 'a two' one --dir '" in text or "tidegate view one 'a two' --dir '" in text


def test_a_server_that_is_started_by_hand_says_where_it_serves(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    command = [sys.executable, "-m", "tidegate", "gateway", "--model.path", str(model), "--gateway.port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as gateway:
        try:
            assert gateway.stderr is not None
            found = next(
                filter(None, (re.search(r"serving at (http://\S+) ", one) for one in gateway.stderr))
            )
            with urllib.request.urlopen(f"{found[1]}/health", timeout=60) as response:
                assert response.status == 200
        finally:
            gateway.terminate()
            gateway.wait(60)
