"""What is said when a run is over."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from tidegate.config import Settings
from tidegate.launch import _finish
from tidegate.trainer.run import Result
from tidegate.viewer.live import make_view


def test_a_run_that_failed_before_it_began_is_started_again_not_resumed(tmp_path: Path) -> None:
    settings = Settings.model_validate({"run": {"dir": str(tmp_path), "name": "x"}, "model": {"path": "m"}})
    settings.run_dir.mkdir(parents=True)
    output = io.StringIO()
    view = make_view(True, 30, 2, Console(file=output, width=200))
    view.started({"name": "x", "dir": str(settings.run_dir)})

    _finish(settings, view, Result("failed", "no engine", 0, {}, {}))
    assert f"train from the start:\n    tidegate train {settings.run_dir}/config.toml\n" in output.getvalue()
    assert "tidegate audit" not in output.getvalue()

    (settings.run_dir / "ledger.jsonl").touch()
    _finish(settings, view, Result("failed", "no engine", 0, {}, {}))
    assert f"{settings.run_dir}/config.toml --resume\n" in output.getvalue()
    assert "tidegate audit" in output.getvalue()
