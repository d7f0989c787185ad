"""Progress lines of an evaluation when standard error is not a terminal."""

from __future__ import annotations

import pytest

from tidegate.evaluation.progress import EvalProgress


def test_an_evaluation_of_nothing_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    EvalProgress("evaluation")(0, 0)
    assert capsys.readouterr().err == "evaluation: 0 of 0\n"


def test_a_line_is_printed_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = EvalProgress("evaluation")
    for done in range(201):
        progress(done, 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"evaluation: {done} of 200" for done in range(20, 201, 20)]
