"""`tidegate judge`: labelled rows, the figures against scikit-learn's definitions, failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripted_judge import Endpoint, judge_in_thread
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.evaluation.agreement import auc, compare, read_labelled
from tidegate.trainer.records.judge import spearman


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=60).astype(np.float64)
    scores = rng.integers(5, size=60) / 4
    good, bad = scores[labels == 1], scores[labels == 0]
    pairs = np.sign(good[:, None] - bad[None, :])
    assert auc(labels, scores) == pytest.approx(((pairs + 1) / 2).mean())
    assert auc(np.ones(3), np.arange(3.0)) is None


def test_the_rank_correlation_is_that_of_mean_ranks() -> None:
    scipy = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    first = rng.integers(4, size=40).astype(np.float64)
    second = first + rng.normal(size=40)
    assert spearman(first, second) == pytest.approx(scipy.spearmanr(first, second).statistic)
    assert spearman(first, np.ones(40)) is None


def test_the_figures_follow_the_labels() -> None:
    labels, scores = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0.9, 0.2, 0.6, 0.1])
    figures = compare(labels, scores, 0.5)
    assert figures["accuracy"]["value"] == 0.5
    assert figures["confusion"] == {"true_good": 1, "false_good": 1, "false_bad": 1, "true_bad": 1}
    assert figures["auc"]["value"] == 0.75
    assert figures["auc"]["low"] <= 0.75 <= figures["auc"]["high"]
    graded = compare(np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.2, 0.3]), 0.5)
    assert graded["spearman"]["value"] == pytest.approx(1.0)
    assert "auc" not in graded
    grouped = compare(labels, scores, 0.5, ["a", "b", "a", "b"])
    assert grouped["auc"]["value"] == 1.0, "only attempts of one group are compared"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "p", "output": "o"}', "prompt, output and label"),
        ('{"prompt": "p", "output": "o", "label": 1, "reward": 1}', "prompt, output and label"),
        ('{"prompt": "p", "output": "o", "label": 2}', "label = 2 is not"),
        ('{"prompt": 1, "output": "o", "label": 1}', "neither a text nor"),
        ("", "has no rows"),
    ],
)
def test_rows_that_are_invalid_are_named(tmp_path: Path, row: str, why: str) -> None:
    file = tmp_path / "gold.jsonl"
    file.write_text(row)
    with pytest.raises(ConfigError, match=why):
        read_labelled(file)


@pytest.fixture
def judge() -> Iterator[Endpoint]:
    with judge_in_thread() as endpoint:
        yield endpoint


def gold(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    file = tmp_path / "gold.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, judge: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p", "output": f"it is {n / 10}", "label": n > 4} for n in range(1, 10)]
    settings = tmp_path / "config.toml"
    section = f'[env.judge]\nurl = "{judge.url}"\nmodel = "m"\nrubric = "r"\n'
    settings.write_text(f'[run]\nname = "x"\n[env]\nuse = "gsm8k"\n{section}')
    words = ["judge", "--gold", gold(tmp_path, rows), "--judge", str(settings)]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "9 labelled attempts, 0 without a verdict" in table
    assert ["label", "good", "5", "0"] in [line.split() for line in table.splitlines()]
    assert main([*words, "--json", "--threshold", "0.7"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["auc"]["value"] == 1.0
    assert figures["confusion"]["false_bad"] == 2
    assert figures["costs"] == {"calls": 9, "errors": 0, "prompt_tokens": 90, "completion_tokens": 27}


def test_rows_without_a_verdict_are_left_out_and_reported(
    tmp_path: Path, judge: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.reply = lambda body: (400, "too long") if "bad" in str(body) else '{"scores": {"score": 1}}'
    rows = [{"prompt": "p", "output": text, "label": 1} for text in ("good", "bad")]
    words = ["judge", "--gold", gold(tmp_path, rows), f"--env.judge.url={judge.url}", "--env.judge.model=m"]
    assert main([*words, "--env.judge.rubric=r", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert (figures["failed"], figures["accuracy"]["value"]) == (1, 1.0)
    assert "too long" in next(iter(figures["failures"]))


def test_a_ranking_compares_groups(
    tmp_path: Path, judge: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "p", "output": f"{group} 0.{n}", "label": n / 2, "group": group}
        for group in ("a", "b")
        for n in range(3)
    ]
    words = ["judge", f"--env.judge.url={judge.url}", "--env.judge.model=m", "--env.judge.kind=ranking"]
    words += ["--env.judge.rubric=r", "--json", "--gold"]
    assert main([*words, gold(tmp_path, rows)]) == 0
    assert json.loads(capsys.readouterr().out)["auc"]["value"] == 1.0
    assert len(judge.requests) == 2
    assert main([*words, gold(tmp_path, rows[:1])]) == 2
    assert "needs rows with the same group" in capsys.readouterr().err


def test_a_command_without_a_judge_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", "--gold", gold(tmp_path, [])]) == 2
    assert "there is no judge" in capsys.readouterr().err
