"""The commands that the console and the report suggest after a run."""

from __future__ import annotations

from pathlib import Path

from tests.unit.viewer.dashboard_run import write_dashboard_run
from tidegate.trainer.ledger.entries import entry
from tidegate.viewer.report import write_report
from tidegate.viewer.summary import next_steps


def test_after_a_failure_they_help_to_find_its_cause(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    (run.dir / "logs").mkdir()
    (run.dir / "logs" / "engine.log").touch()
    (run.dir / "dead_letters.jsonl").touch()
    resume = f"tidegate train {run.dir}/config.toml --resume"
    result: dict[str, object] = {"status": "failed", "resume": resume, "report": "r", "checkpoint": "c"}
    assert [command for _, command in next_steps(result, run.dir)] == [
        f"tidegate view {run.dir}",
        f"{run.dir}/logs",
        f"tidegate tasks {run.dir} --quarantined",
        f"tidegate doctor {run.dir}/config.toml",
        f"tidegate audit {run.dir}",
        resume,
        "r",
    ]
    assert (
        "tidegate engine --model.path c"
        in dict(next_steps({**result, "status": "completed"}, run.dir)).values()
    )


def test_a_checkpoint_at_a_service_is_served_from_there(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    settings = '[trainer]\nbackend = "tinker"\n[trainer.tinker]\nbase_model = "Qwen/Qwen3-8B"\n'
    (run.dir / "config.toml").write_text(settings + 'base_url = "http://127.0.0.1:8000"\n')
    assert dict(next_steps({"checkpoint": "c"}, run.dir))["serve the checkpoint"] == (
        "tidegate tinker --model.path c --tinker.base_model Qwen/Qwen3-8B --tinker.base_url http://127.0.0.1:8000"
    )


def test_a_failure_before_anything_was_written_suggests_nothing_that_needs_a_file(tmp_path: Path) -> None:
    assert next_steps({"status": "failed", "resume": "tidegate train x"}, tmp_path) == [
        ("then train from the start", "tidegate train x")
    ]


def test_the_report_of_a_run_that_reached_its_target_does_not_continue_it(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    why = "the held-out reward 0.9 reached trainer.until = 0.8 at step 3"
    run.ledger.record(entry("run", "ended", step=3, version=3, status="completed", why=why))
    page = write_report(run.dir).read_text()
    assert why in page
    assert "tidegate engine" in page
    assert "--resume" not in page


def test_the_report_of_a_failed_run_suggests_the_same(tmp_path: Path) -> None:
    run = write_dashboard_run(tmp_path / "run")
    run.ledger.record(entry("run", "ended", step=3, version=3, status="failed", why="no engine responds"))
    page = write_report(run.dir).read_text()
    assert f"tidegate doctor {run.dir}/config.toml" in page
    assert "tidegate engine" not in page
