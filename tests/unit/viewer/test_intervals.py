"""Confidence intervals of a run's evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.viewer.dashboard_run import write_dashboard_run
from tidegate.evaluation.stats import wilson
from tidegate.viewer.dashboard import run as followed
from tidegate.viewer.dashboard.app import create_app
from tidegate.viewer.dashboard.run import FollowedRun


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


def test_each_score_has_an_interval_over_its_episodes(tmp_path: Path) -> None:
    """Rewards of 0 and 1 have Wilson's interval, others that of the bootstrap; failures are left out."""
    run = write_dashboard_run(tmp_path / "run")
    rewards = (0.25, 0.5, None)
    run.files.evaluation(4, [("", "sampled", run.simple(None, 0, reward)) for reward in rewards])
    run.metrics(4)
    with TestClient(create_app(FollowedRun(run.dir)), base_url="http://127.0.0.1") as client:
        found: dict[str, Any] = client.get("/api/evaluations").json()
    by_step = {one["step"]: one["intervals"] for one in found["evaluations"]}
    assert list(by_step[0]) == ["eval/reward", "eval/reward_greedy", "eval/reward_unseen_templates"]
    last = by_step[3]["eval/reward"]
    assert (last["mean"], last["tasks"], last["method"]) == (1.0, 3, "Wilson score interval")
    assert [last["low"], last["high"]] == pytest.approx(wilson(3, 3))
    parts = by_step[4]["eval/reward"]
    assert (parts["mean"], parts["tasks"]) == (0.375, 2)
    assert "bootstrap" in parts["method"]
    assert 0.25 <= parts["low"] < parts["high"] <= 0.5
    assert math.isclose(parts["level"], 0.95)
