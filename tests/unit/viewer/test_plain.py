"""Plain progress lines: one per step, in columns; a closed pipe does not end the run."""

from __future__ import annotations

import io
import os
import random
import re
from collections import Counter

import pytest
from rich.console import Console

from tests.unit.viewer.viewer_run import evaluation, metrics_row
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.live_state import LiveState
from tidegate.viewer.log_view import PlainView


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(console: Console) -> list[str]:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def view(console: Console, clock: Clock) -> PlainView:
    return PlainView(SafeConsole(console), 100, 2, clock)


def test_one_line_a_step_in_columns(view: PlainView, console: Console, clock: Clock) -> None:
    rng, counts = random.Random(1), Counter[str]()
    for step in range(1, 101):
        clock.now = step * 7.0
        row = metrics_row(step, 100, rng, counts)
        row |= {"groups/stale": 0, "groups/failed": 0}
        view.state(row)
        view.step(row)
    lines = lines_of(console)
    assert len(lines) == 100
    assert lines[9].endswith("  about 10:30 left")  # 90 steps of 7 s
    assert len({len(line.split("  about ")[0]) for line in lines}) == 1
    for word in ("reward", "staleness", "tokens/s", "data"):
        assert len({line.index(word) for line in lines}) == 1
    assert "step  10/100" in lines[9]


def test_the_first_lines_name_the_staleness_bound_and_the_run_directory(
    view: PlainView, console: Console
) -> None:
    view.started({"name": "demo", "dir": "runs/demo", "agent": "solver"})
    assert lines_of(console)[1].endswith("staleness bound 2; files in runs/demo")


def test_without_a_limit_only_the_step_is_printed(console: Console, clock: Clock) -> None:
    view = PlainView(SafeConsole(console), None, 2, clock)
    view.started({"name": "online", "dir": "runs/online", "agent": "clients", "steps": None})
    view.step({"step": 7, "reward/mean": 0.5})
    lines = lines_of(console)
    assert "steps" not in lines[0]
    assert re.search(r"step +7  reward", lines[-1])


def test_a_step_has_its_loss(view: PlainView, console: Console) -> None:
    view.step({"step": 1, "reward/mean": 0.5, "loss": -0.0317})
    assert "loss  -0.032" in lines_of(console)[0]


def test_an_evaluation_is_a_line_of_its_own(view: PlainView, console: Console) -> None:
    view.step({"step": 0, **evaluation(0, 100, random.Random(0))})
    (line,) = lines_of(console)
    assert "evaluation after step 0: held out, sampled 0.3" in line
    assert "held out, unseen templates 0.2" in line


def test_an_evaluation_beside_training_is_of_the_step_that_it_evaluated(
    view: PlainView, console: Console
) -> None:
    row = {"step": 7, "eval/reward": 0.5, "eval/step": 5.0}
    view.step(row)
    assert "evaluation after step 5: held out, sampled 0.5" in lines_of(console)[-1]
    live = LiveState(total_steps=10, bound=2, started_at=0.0)
    live.add_step(row, 1.0)
    assert (live.at, live.eval_step) == (7, 5)
    live.add_step({"step": 10, "eval/reward": 0.6}, 2.0)
    assert live.eval_step == 10


def test_losses_are_named(view: PlainView, console: Console) -> None:
    total = {"reward/mean": 0.5, "groups/stale": 3.0, "groups/failed": 1.0}
    view.step({"step": 1, **total, "selection/stale_groups": 3.0, "selection/failed_groups": 1.0})
    view.step({"step": 2, **total, "selection/stale_groups": 0.0, "selection/failed_groups": 0.0})
    said = [line.partition("so far: ")[2].partition("  about")[0] for line in lines_of(console)]
    assert said == ["stale 3 (+3), failed 1 (+1)", "stale 3, failed 1"]


def test_progress_is_printed_seldom_and_at_the_end(view: PlainView, console: Console, clock: Clock) -> None:
    for done in range(1, 201):
        clock.now += 0.1
        view.progress("evaluation", done, 200)
    said = [line.partition("] ")[2] for line in lines_of(console)]
    assert said[-1] == "evaluation 200/200"
    assert len(said) == 2
    view.progress("evaluation", 1, 200)
    assert len(lines_of(console)) == 2


def test_long_waits_are_reported(view: PlainView, console: Console, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 0.5
        view.state({"groups/live": 12.0, "groups/ready": 3.0, "tokens/sampled_total": clock.now * 100})
    lines = lines_of(console)
    assert len(lines) == 1
    assert "waiting: groups 12 live, 3 ready, 0 leased; 100 tokens/s" in lines[0]


def test_a_wait_names_the_groups_that_were_filtered_meanwhile(
    view: PlainView, console: Console, clock: Clock
) -> None:
    view.step({"step": 3, "reward/mean": 0.5, "groups/filtered": 4.0, "groups/filtered_failed": 4.0})
    counts = {"groups/live": 12.0, "groups/filtered": 34.0, "groups/filtered_solved": 10.0}
    clock.now += 31.0
    view.state({**counts, "groups/filtered_failed": 22.0, "groups/filtered_cut": 5.0})
    why = (
        "30 groups filtered since step 3: 10 all solved, 18 all failed (5 with every reply cut at a token "
        "limit), 2 with other equal rewards or by trainer.filter; "
    )
    assert f"waiting: groups 12 live, 0 ready, 0 leased; {why}" in lines_of(console)[-1]


def test_text_from_elsewhere_stays_one_harmless_line(view: PlainView, console: Console) -> None:
    view.note("[/x] [red]" + "long " * 40 + "\x1b[2J")
    (line,) = lines_of(console)
    assert "[/x] [red]" in line
    assert "\x1b" not in line


def test_a_closed_pipe_does_not_end_the_run(clock: Clock) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", buffering=1) as file:
        view = PlainView(SafeConsole(Console(file=file, width=80)), 100, 2, clock)
        view.note("one")
        assert isinstance(view.out.lost, BrokenPipeError)
        view.step({"step": 1, "reward/mean": 0.5})
        view.finished({"status": "completed"})
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is buffered may go on closing


def test_a_full_disk_does_not_end_the_run(clock: Clock) -> None:
    with open("/dev/full", "w", buffering=1) as file:
        view = PlainView(SafeConsole(Console(file=file, width=80)), 100, 2, clock)
        view.note("one")
        view.note("two")
        assert view.out.lost is not None
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def test_an_ascii_terminal_gets_question_marks(clock: Clock) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80)
    view = PlainView(SafeConsole(console), 100, 2, clock)
    view.note("0.3 → 0.9")
    view.finished({"status": "completed", "before": {"eval/reward": 0.3}, "after": {"eval/reward": 0.9}})
    assert b"0.3 ? 0.9" in raw.getvalue()
    assert b"0.900" in raw.getvalue()
