"""Grades of short answers by SQuAD's rules, in cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.envs.search.grading import (
    exact_match,
    extract,
    f1,
    normalize,
    recall,
    sub_exact_match,
    well_formed,
)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("U.S.A.", "usa"),
        ("Anna-the-great", "annathegreat"),  # punctuation goes before articles are looked for
        ("theatre", "theatre"),
        ("  ", ""),
        ("1,234", "1234"),
    ],
)
def test_normalization(text: str, plain: str) -> None:
    assert normalize(text) == plain


@pytest.mark.parametrize(
    ("said", "golds", "em", "sub_em", "f1_score"),
    [
        ("Barack Obama", ["barack obama"], 1, 1, 1.0),
        ("the president Barack Obama", ["Barack Obama"], 0, 1, 0.8),
        ("Obama", ["Barack Obama", "Obama"], 1, 1, 1.0),
        ("Obama", ["Barack Obama"], 0, 0, 2 / 3),
        ("Paris", ["London", "Rome"], 0, 0, 0.0),
        ("b b a1", ["b a1 a1"], 0, 0, 2 / 3),  # words count as often as they occur in both
        ("", ["x"], 0, 0, 0.0),
        ("anything", ["the"], 0, 0, 0.0),  # a gold answer of which nothing is left is contained in nothing
        ("x", [], 0, 0, 0.0),
    ],
)
def test_grades(said: str, golds: list[str], em: float, sub_em: float, f1_score: float) -> None:
    assert exact_match(said, golds) == em
    assert sub_exact_match(said, golds) == sub_em
    assert f1(said, golds) == pytest.approx(f1_score)


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_grades_are_ordered(said: str, golds: list[str]) -> None:
    assert 0 <= exact_match(said, golds) <= f1(said, golds) <= 1
    assert exact_match(said, golds) == 0 or normalize(said) == "" or sub_exact_match(said, golds) == 1


@pytest.mark.parametrize(
    ("output", "min_matches", "answer"),
    [
        ("<answer>Rome</answer>", 1, "Rome"),
        ("<answer>Paris</answer> no: <answer>\n Rome </answer>", 1, "Rome"),
        ("<answer>Rome", 1, None),
        ("Rome", 1, None),
        (None, 1, None),
        ("e.g. <answer>Beijing</answer>", 2, None),  # that is the prompt's own
        ("e.g. <answer>Beijing</answer> … <answer>Rome</answer>", 2, "Rome"),
    ],
)
def test_extraction(output: str | None, min_matches: int, answer: str | None) -> None:
    assert extract(output, min_matches) == answer


def test_many_opening_tags_take_no_long_time() -> None:
    assert extract("<answer>" * 50_000) is None


@pytest.mark.parametrize(
    ("output", "value"),
    [
        ("So: <answer>Rome</answer>\n", 1),
        ("<answer>Rome</answer> I think", 0),
        ("<answer>Rome</answer><answer>Paris</answer>", 0),
        ("<answer>Rome", 0),
        ("</answer><answer>", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_form(output: str | None, value: float) -> None:
    assert well_formed(output) == value


def test_recall_counts_gold_documents_that_tools_returned() -> None:
    messages = [
        {"role": "user", "content": "[d3] and Rome, the city"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "[d1] Rome\nA city in Italy.\n[d10] Romulus\nA founder; see [d2]."},
        {"role": "tool", "content": "Kelmor works at Dunvik."},
    ]
    assert recall(messages, {"d1": "", "d2": "", "d3": ""}) == pytest.approx(1 / 3)
    assert (
        recall(messages, {"train-1": "Kelmor works at Dunvik.", "train-2": "Dunvik is based in Tarlo."})
        == 0.5
    )
    assert recall(messages, {"Romulus": "", "Remus": ""}) == 0.5  # by title, as HotpotQA names them
    assert recall([], {"d1": ""}) == 0.0
