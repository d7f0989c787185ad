"""Very long runs: the charts get fewer rows, which do not depend on how the file grew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.viewer.dashboard import run as dashboard_run
from tidegate.viewer.dashboard.run import Downsampled, one_of
from tidegate.viewer.run_files import Row, RunFiles


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_run, "MOST_ROWS", 10)


def row(step: int, value: float = 0.0) -> Row:
    return {"step": float(step), "reward/mean": value or float(step % 7)}


def files(count: int) -> RunFiles:
    return RunFiles(Path("run"), rows=[row(step) for step in range(count)])


def test_a_short_run_is_left_alone() -> None:
    run = files(10)
    assert Downsampled().of(run) is run


@pytest.mark.parametrize("count", [11, 12, 40, 41, 42, 43, 500])
def test_downsampling_row_by_row_gives_the_same_rows(count: int) -> None:
    grown, run = Downsampled(), files(0)
    for step in range(count):
        run.rows.append(row(step))
        shown = grown.of(run)
    assert shown.rows == Downsampled().of(files(count)).rows
    assert len(shown.rows) <= 12
    assert [shown.rows[0]["step"], shown.rows[-1]["step"]] == [0, count - 1]
    total = sum(one["reward/mean"] for one in run.rows[1:]) / (count - 1)
    assert (
        min(one["reward/mean"] for one in run.rows) <= total <= max(one["reward/mean"] for one in shown.rows)
    )


def test_a_run_that_went_back_is_made_anew() -> None:
    grown, run = Downsampled(), files(60)
    grown.of(run)
    del run.rows[30:]
    run.rows += [row(step, 100.0) for step in range(30, 60)]
    assert grown.of(run).rows == Downsampled().of(run).rows
    assert grown.of(run).rows[-2]["reward/mean"] == 100.0


def test_scores_that_join_the_newest_row_are_seen() -> None:
    grown, run = Downsampled(), files(41)
    grown.of(run)
    run.rows[-1]["eval/reward"] = 0.75
    assert grown.of(run).rows[-1]["eval/reward"] == 0.75
    run.rows.append(row(41))
    assert 0.75 in [one.get("eval/reward") for one in grown.of(run).rows]


def test_a_downsampled_row_combines_its_steps() -> None:
    found = one_of(
        [
            {"step": 1, "tokens/sampled_total": 10, "groups/stale": 1, "staleness/max": 2, "loss": 1},
            {
                "step": 2,
                "tokens/sampled_total": 30,
                "groups/stale": 4,
                "staleness/max": 0,
                "loss": 3,
                "ess": 1,
            },
        ]
    )
    expected = {
        "step": 2,
        "tokens/sampled_total": 30,
        "groups/stale": 4,
        "staleness/max": 2,
        "loss": 2,
        "ess": 1,
    }
    assert found == expected
