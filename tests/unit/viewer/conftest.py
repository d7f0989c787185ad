"""Runs of the dashboard's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.viewer.dashboard_run import Writer, write_dashboard_run
from tidegate.viewer.dashboard import run as followed


@pytest.fixture
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "FRESH_S", -1.0)


@pytest.fixture
def growing(tmp_path: Path) -> Writer:
    return write_dashboard_run(tmp_path / "run")
