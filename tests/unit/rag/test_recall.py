"""Recall of an index: its measurement, the choice of nprobe, and the warning below the target."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rag_corpus import build_quietly, passages, write_jsonl
from tidegate.progress import Progress
from tidegate.rag import build as build_module
from tidegate.rag.build import Plan
from tidegate.rag.index.recall import TARGET, choose_nprobe
from tidegate.rag.server.service import RagOptions, open_searcher


def chosen(
    recall_at: Callable[[int], float], limit: int = 1024, target: float = 0.95
) -> tuple[int, float, list[int]]:
    tried: list[int] = []

    def counted(nprobe: int) -> float:
        tried.append(nprobe)
        return recall_at(nprobe)

    return *choose_nprobe(counted, limit, target, Progress(io.StringIO())), tried


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 20, 100, 700, 1024])
def test_the_smallest_nprobe_that_reaches_the_target_is_chosen(needed: int) -> None:
    nprobe, recall, tried = chosen(lambda n: min(1.0, n / needed * 0.95))
    assert needed <= nprobe <= needed * 8 / 7
    assert recall >= 0.95
    assert len(tried) <= 15


def test_codes_that_cannot_reach_the_target_do_not_make_nprobe_grow() -> None:
    nprobe, recall, tried = chosen(lambda n: min(0.6, 0.1 * n))
    assert (nprobe, recall) == (8, 0.6)
    assert max(tried) == 16


def test_nprobe_is_never_more_than_the_number_of_lists() -> None:
    assert chosen(lambda n: n / 200, limit=100)[:2] == (100, 0.5)
    assert chosen(lambda n: 0.2, limit=1)[:2] == (1, 0.2)


@pytest.mark.parametrize("target", [0.5, 0.8, 0.95])
def test_the_recorded_recall_reaches_the_target(tmp_path: Path, target: float) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", passages(600))
    plan = Plan([source], tmp_path / "index", "hash", kind="ivf-flat", recall=target)
    manifest, said = build_quietly(plan)
    entry = manifest.index
    assert entry is not None
    assert entry.nprobe is not None
    assert entry.recall[10] >= target
    assert entry.target == target
    assert entry.warning is None
    assert f"ivf-flat, nprobe {entry.nprobe}, recall@10 {entry.recall[10]:.3f}" in said
    assert "warning" not in said


def test_a_recall_below_the_target_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "measure", lambda *_: (4, 0.41))
    source = write_jsonl(tmp_path / "c.jsonl", passages(100))
    _, said = build_quietly(Plan([source], tmp_path / "index", "hash", kind="ivf-sq8"))
    why = f"recall@10 is 0.410 against exact search, below the target of {TARGET:g}"
    assert f"warning: {why}" in said
    with caplog.at_level(logging.INFO, "tidegate.rag"):
        searcher = open_searcher(tmp_path / "index", RagOptions(tmp_path / "index"))
    assert "100 documents, ivf-sq8, nprobe 4, recall@10 0.410" in caplog.text
    assert why in caplog.text
    assert searcher.info["index"] == {
        "kind": "ivf-sq8",
        "nprobe": 4,
        "recall": {"10": 0.41},
        "target": TARGET,
    }
    assert why in searcher.info["warning"]
