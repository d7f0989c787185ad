"""`tidegate init --data`: columns are found or refused, and the project scores answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tidegate.agents.base import load_agent
from tidegate.cli import main
from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.envs.datasets.columns import inspect_data
from tidegate.errors import ConfigError


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(question: str, answer: str, value: str = "#### {n}") -> list[dict[str, str]]:
    return [{question: f"Say {n}.", answer: value.format(n=n)} for n in range(20)]


@pytest.mark.parametrize("question", ["question", "prompt", "problem", "input", "instruction", "Question"])
@pytest.mark.parametrize("answer", ["answer", "solution", "output", "target", "ANSWER"])
def test_columns_are_found_by_their_names(tmp_path: Path, question: str, answer: str) -> None:
    options = inspect_data(jsonl(tmp_path / "d.jsonl", rows(question, answer))).options
    assert (options["prompt"], options["answer"]) == (question, answer)


@pytest.mark.parametrize(
    ("columns", "given", "problem"),
    [
        ({"q": "1", "a": "1"}, {}, "has the columns q, a; none is named question, prompt"),
        ({"question": "1", "a": "1"}, {}, "none is named answer, solution"),
        ({"question": "1", "prompt": "1", "answer": "1"}, {}, "question and prompt may each be the question"),
        ({"question": "1", "answer": "1", "output": "1"}, {}, "answer and output may each be the answer"),
        ({"q": "1", "a": "1"}, {"question": "p"}, "there is no column 'p' for --question: .* columns q, a"),
        ({"question": "", "answer": "1"}, {}, "no row can be used; the first one: .*line 1: 'question'"),
        ({"question": "1", "answer": None}, {}, "no row can be used; the first one: .*line 1: 'answer'"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, {}, "does not end with a message of the assis"),
    ],
)
def test_uncertain_columns_are_refused(
    tmp_path: Path, columns: dict[str, Any], given: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        inspect_data(jsonl(tmp_path / "d.jsonl", [columns]), **given)
    if "named" in problem or "may each" in problem:
        assert "--question COLUMN --answer COLUMN" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reward"),
    [("{n}", "numeric"), ("so\n#### {n}", "numeric"), ("x^{n}", "math_verify"), ("word{n}", "exact_match")],
)
def test_the_reward_fits_the_answers(tmp_path: Path, value: str, reward: str) -> None:
    data = inspect_data(jsonl(tmp_path / "d.jsonl", rows("q", "a", value)), "q", "a")
    assert data.options["rewards"] == [reward]
    assert data.options["prompt"] == ("{q}\nReply with the answer only." if reward == "exact_match" else "q")
    assert not data.long_answers
    assert data.train + data.held_out == 20


def test_long_texts_are_pointed_out(tmp_path: Path) -> None:
    assert inspect_data(jsonl(tmp_path / "d.jsonl", rows("question", "answer", "word " * 20))).long_answers


def test_the_project_scores_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "d.jsonl", [*rows("question", "answer"), {"question": "?"}])
    assert main(["init", "mine", "--data", "d.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "skipped: 1; first: " in said
    assert "d.jsonl, line 21: there is no key 'answer'" in said
    monkeypatch.chdir("mine")
    settings = load_settings(Path("config.toml"))
    load_agent(settings.agent.use, settings.agent.options)
    environment = load_environment(settings.env.use, settings.env.options)
    task = environment.train_task(0)
    assert environment.score(task, None, task.answer, []).reward == 1
    assert environment.score(task, None, "#### 77", []).reward == 0
    assert main(["train", "config.toml", "--dry-run"]) == 0


@pytest.mark.parametrize(
    "words", [["--data", "d.jsonl", "--stateful"], ["--question", "q"], ["--stateful", "--answer", "a"]]
)
def test_contradictions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(["init", "mine", *words])
    except SystemExit as ended:
        code = ended.code
    assert code not in (0, None)
    assert words[0] in (said := capsys.readouterr().err) or words[-2] in said
    assert not (tmp_path / "mine").exists()
