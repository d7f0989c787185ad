"""The gallery has the commands, pictures and goals of its script, and the script finds a low reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.gallery import run
from tests import REPO
from tests.unit.test_docs import TARGETS

PAGE = (REPO / "docs/gallery.md").read_text()
LARGEST = 40_000
"""Bytes of a picture."""


@pytest.mark.parametrize("card", run.CARDS, ids=lambda card: card.name)
def test_a_card_has_command_picture_and_goal(card: run.Card) -> None:
    assert card.target in TARGETS
    assert f"`make {card.target}`" in PAGE
    assert f"gallery/{card.name}.png" in PAGE
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| [{card.name}]"))
    assert row.endswith(f"| {card.goal:g} |")
    assert (REPO / f"docs/gallery/{card.name}.png").stat().st_size < LARGEST


def test_every_example_has_a_card() -> None:
    missing = [
        path.parent.name
        for path in sorted(REPO.glob("examples/*/config*.toml"))
        if f"examples/{path.parent.name}" not in PAGE
    ]
    assert missing == []


def test_a_run_below_its_goal_or_without_files_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    card = run.Card("a", "demo", "a", 0.8)
    assert not run.check(card, only_draw=True)
    assert "metrics.jsonl" in capsys.readouterr().out
    metrics = tmp_path / "runs/a/metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    for reward, reached in ((0.7, False), (0.9, True)):
        metrics.write_text(json.dumps({"step": 1, "reward/mean": 0.85, "eval/reward": reward}) + "\n")
        assert run.check(card, only_draw=True) is reached
    assert (tmp_path / "a.png").stat().st_size < LARGEST


def test_without_held_out_rewards_the_last_steps_count() -> None:
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate((0.0, 0.8, 0.8, 0.9, 0.9))]
    assert run.final(rows) == pytest.approx(0.85)
    with pytest.raises(ValueError, match="no training step"):
        run.final([{"step": 0}])
