"""The live view: its content, its size, and its low cost."""

from __future__ import annotations

import io
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.unit.viewer.viewer_run import evaluation, metrics_row, write_run
from tidegate.observer import Silent
from tidegate.program import program
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.formatting import binned, duration, number, printable, smoothed, sparkline
from tidegate.viewer.live import LiveView, make_view, screen
from tidegate.viewer.live_state import LiveState, Rate
from tidegate.viewer.log_view import PlainView

INFO = {"name": "demo", "model": "models/tiny", "env": "arithmetic", "agent": "solver", "steps": 100}


class Terminal(io.StringIO):
    """A terminal that counts what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)

    def isatty(self) -> bool:
        return True


def board_after(steps: int) -> LiveState:
    rng, counts = random.Random(0), Counter[str]()
    board = LiveState(100, 2, 0.0, info=dict(INFO))
    board.add_step({"step": 0, **evaluation(0, 100, rng)}, 1.0)
    for step in range(1, steps + 1):
        row = metrics_row(step, 100, rng, counts)
        board.add_step(row | (evaluation(step, 100, rng) if step == 25 else {}), step * 2.0)
        board.add_state({"tokens/sampled_total": step * 8000.0, "groups/live": 12.0}, step * 2.0)
    board.news.append((0.5, "engine ready in 3.1 s"))
    return board


def drawn(board: LiveState, width: int, clock: float = 80.0) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(board, clock, width))
    return captured.get()


@pytest.mark.parametrize("steps", [0, 1, 40, 100])
@pytest.mark.parametrize("width", [24, 40, 80, 100, 220])
def test_every_line_fits_the_terminal(steps: int, width: int) -> None:
    lines = drawn(board_after(steps), width).splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert len(lines) <= 24


def test_the_live_view_shows_step_time_and_scores() -> None:
    board = board_after(40)
    board.last |= {"time/step": 2.0}
    text = " ".join(drawn(board, 100).split())
    assert "step 40/100" in text
    assert "1:20 elapsed, about 2:00 left" in text  # 2 s a step, 60 to go
    first, last = board.first_eval["eval/reward"], board.last_eval["eval/reward"]
    assert f"sampled {first:.3f} → {last:.3f}" in text
    assert "at step 25" in text
    assert f"max {board.last['staleness/max']:.0f}, bound 2" in text
    assert "4,000 tokens/s" in text
    assert "12 live" in text
    assert f"{board.last['groups/filtered']:.0f} filtered" in text
    assert "engine ready in 3.1 s" in text


def test_one_evaluation_is_not_shown_as_a_change() -> None:
    board = board_after(3)
    assert "→" not in next(line for line in drawn(board, 100).splitlines() if "held out" in line)


def test_the_waits_of_trainer_and_rollout_are_two_bars_in_proportion() -> None:
    board = LiveState(10, 2, 0.0, info=dict(INFO))
    board.add_step({"step": 1, "time/step": 2.0, "time/wait_for_batch": 1.0, "time/batch_queue": 5.0}, 1.0)
    trainer, data = (line for line in drawn(board, 100).splitlines() if "a step" in line and "█" in line)
    assert trainer.count("█") == 10
    assert data.count("█") == 20  # never longer than the step
    assert "5.0 of 2.0 s" in data


def test_without_a_limit_only_the_step_is_shown() -> None:
    board = LiveState(None, 2, 0.0, info=dict(INFO))
    for step in (1, 2, 3):
        board.add_step({"step": step, "reward/mean": 0.5}, float(step))
    line = next(line for line in drawn(board, 100).splitlines() if "step 3" in line)
    assert "step 3 " in line
    assert "left" not in line


def test_no_bound_and_unknown_numbers() -> None:
    board = LiveState(10, None, 0.0, info=dict(INFO))
    board.add_step({"step": 1, "reward/mean": float("nan"), "staleness/mean": 3.0}, 1.0)
    text = drawn(board, 100)
    assert "bound none" in text
    assert "nan" not in text


def test_text_from_elsewhere_neither_styles_nor_drives_the_terminal() -> None:
    board = LiveState(10, 2, 0.0, info={**INFO, "name": "[red]x[/red]"})
    board.news.append((1.0, "agent said: [bold]\x1b[2J\x1b]0;owned\x07[/nonsense] \ud800"))
    text = drawn(board, 100)
    assert "[red]x[/red]" in text
    assert "[/nonsense]" in text
    assert "\x1b" not in text
    text.encode()


def test_calls_do_not_draw() -> None:
    """A thread draws twice a second at most, however often the trainer tells something."""
    terminal = Terminal()
    console = Console(
        file=terminal, force_terminal=True, width=100, color_system=None, _environ={"TERM": "xterm"}
    )
    view = make_view(True, 100, 2, console)
    assert isinstance(view, LiveView)
    view.started(INFO)
    before = terminal.writes
    for step in range(2000):
        view.state({"groups/live": float(step)})
        view.step({"step": float(step), "reward/mean": 0.5})
        view.note("news")
        view.progress("evaluation", 3, 10)
    during = terminal.writes - before
    assert view._live.refresh_per_second <= 2
    view.close()
    view.close()
    assert during <= 6
    assert "step 1999/100" in terminal.getvalue()


TOLD: list[Callable[[LiveView], None]] = [
    lambda view: view.note("news"),
    lambda view: view.step({"step": 1.0}),
    lambda view: view.state({"version": 1.0}),
    lambda view: view.progress("evaluation", 1, 2),
]


@pytest.mark.parametrize("call", TOLD)
def test_updates_wait_while_the_live_view_draws(
    call: Callable[[LiveView], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing reads what is told from another thread: never half of it."""
    told, told_while_drawing = threading.Event(), list[bool]()
    view = LiveView(SafeConsole(Console(file=io.StringIO(), width=100)), 100, 2)
    tellers: list[threading.Thread] = []

    def tell() -> None:
        call(view)
        told.set()

    def drawing(board: LiveState, clock: float, width: int) -> str:
        tellers.append(threading.Thread(target=tell))
        tellers[0].start()
        told_while_drawing.append(told.wait(0.05))
        return ""

    monkeypatch.setattr("tidegate.viewer.live.screen", drawing)
    view._draw()
    assert told_while_drawing == [False]
    assert told.wait(5.0)
    tellers[0].join()


@pytest.mark.parametrize(
    ("live", "tty", "encoding", "kind"),
    [
        (True, True, "utf-8", LiveView),
        (False, True, "utf-8", PlainView),
        (True, False, "utf-8", PlainView),
        (True, True, "latin-1", PlainView),
    ],
)
def test_the_view_is_chosen_by_terminal_and_setting(live: bool, tty: bool, encoding: str, kind: type) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=tty, _environ={"TERM": "xterm"})
    assert type(make_view(live, 10, 2, console)) is kind


def test_a_pipe_with_forced_colours_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert isinstance(make_view(True, 10, 2), PlainView)


def test_a_dumb_terminal_gets_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_view(True, 10, 2, console), PlainView)


def test_finished_restores_the_terminal_and_prints_the_resume_command(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", steps=30)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    terminal = Terminal()
    console = Console(
        file=terminal, force_terminal=True, width=60, color_system=None, _environ={"TERM": "xterm"}
    )
    view = make_view(True, 30, 2, console)
    view.started({**INFO, "dir": str(run_dir)})
    resume = f"{program()} train {run_dir}/config.toml --resume --trainer.steps 60"
    view.finished(
        {"status": "interrupted", "why": "Ctrl-C", "before": rows[0], "after": rows[-1],
         "checkpoint": "runs/demo/checkpoints/step_30", "report": "runs/demo/report.html", "resume": resume}
    )  # fmt: skip
    text = terminal.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    after = text[text.rindex("\x1b[?25h") :]
    assert "Interrupted: Ctrl-C" in after
    assert "over 200" in after
    assert f"{rows[0]['eval/reward']:.3f}" in after
    assert f"{rows[-1]['eval/reward_greedy']:.3f}" in after
    assert after.count("Problem heldout-") == 3
    assert f"    {resume}\n" in after  # in one piece, however narrow the terminal
    assert f"{program()} engine --model.path runs/demo/checkpoints/step_30" in after
    assert f"{program()} init my-agent" in after


def test_finished_without_anything_to_show() -> None:
    console = Console(file=io.StringIO(), width=80)
    view = make_view(True, 30, 2, console)
    view.finished({"status": "failed", "why": "no step was taken: [/x]", "before": None, "after": None})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Failed: no step was taken: [/x]" in text
    assert "No evaluation was made." in text


def test_rate_over_a_window_and_after_a_restart() -> None:
    rate = Rate(10.0)
    assert rate.per_second() is None
    for second in range(100):
        rate.add(float(second), second * 5.0 if second < 50 else 250 + (second - 50) * 20.0)
    assert rate.per_second() == pytest.approx(20.0)
    rate.add(100.0, 3.0)
    assert rate.per_second() is None


def test_time_left_follows_the_recent_pace() -> None:
    board = LiveState(100, 2, 0.0)
    assert board.seconds_left() is None
    for step in range(1, 31):
        board.add_step({"step": step}, step * 10.0 if step <= 5 else 50 + (step - 5) * 1.0)
    assert board.seconds_left() == pytest.approx(70.0)


def test_small_texts() -> None:
    assert [duration(x) for x in (-1, 7, 59.6, 754, 3723)] == ["0:00", "0:07", "1:00", "12:34", "1:02:03"]
    assert [number(x) for x in (None, float("nan"), True, 1234.5)] == ["–", "–", "–", "1,234.500"]
    assert [number(0.955), number(0.955, 2), number(0.0005), number(1e30, 0)[:5], number(-0.0125)] == [
        "0.955", "0.96", "0.001", "1,000", "-0.013",
    ]  # fmt: skip
    assert sparkline([0, 0.5, 1], 10) == "▁▅█"
    assert sparkline([0.4, 0.4], 10, 0, 1) == "▄▄"
    assert sparkline([], 10) == ""
    assert sparkline([5, 5], 10) == "▁▁"
    assert len(sparkline(list(range(1000)), 30)) == 30
    assert binned([1, 3, 5, 7], 2) == [2, 6]
    assert smoothed([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    assert printable("a\r\nb\tc\x1b[0m\u202e") == "a\nb\tc\ufffd[0m\ufffd"


def test_the_silent_view_accepts_every_call() -> None:
    view = Silent()
    view.started({})
    view.state({})
    view.finished({})
    view.close()


def test_events_after_the_end_are_still_shown() -> None:
    terminal = Terminal()
    view = make_view(True, 1, 2, Console(file=terminal, force_terminal=True, _environ={"TERM": "xterm"}))
    view.started({**INFO, "resumed_from": 0})
    view.close()
    assert "resumed from step 0" in terminal.getvalue()
    view.note("report.html could not be written: [disk full]")
    assert terminal.getvalue().endswith("report.html could not be written: [disk full]\n")
