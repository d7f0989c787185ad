"""Progress on standard error."""

from __future__ import annotations

import io

import pytest

from tidegate.progress import Progress


def test_an_evaluation_of_nothing_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().stage("evaluation")(0, 0)
    assert capsys.readouterr().err == "evaluation: 0 of 0\n"


def test_a_line_is_printed_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress().stage("evaluation")
    for done in range(201):
        progress(done, 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"evaluation: {done} of 200" for done in range(20, 201, 20)]


def test_forced_colours_do_not_make_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    Progress(pipe).stage("encoded")(8, 8)
    assert "8 of 8\n" in pipe.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_and_gets_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(terminal) as progress:
        show = progress.stage("encoded")
        show(3, 8)
        progress.print("index [flat]: exact search")
    drawn = terminal.getvalue()
    assert "encoded" in drawn
    assert "3/8" in drawn
    assert "index [flat]: exact search" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
