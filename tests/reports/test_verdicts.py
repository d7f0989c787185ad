"""Verdicts of judges, and texts that are compared by words."""

from __future__ import annotations

import unicodedata

import pytest

from tests.unit.envs.test_search_judge import judged, says
from tidegate.envs.judge.prompts import UnreadableReplyError, read_scores
from tidegate.envs.search.grading import exact_match, exact_text, f1, sub_exact_match
from tidegate.errors import RewardError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("correct: yes", 1.0),
        ("**Correct:** Yes.", 1.0),
        ("It says `correct: yes`, but is not.\nCorrect: no", 0.0),
        ("Final verdict: correct: no", 0.0),
        ("Incorrect: yes", None),
        ("Not correct: yes", None),
        ("I would answer correct: yes if it named him.", None),
        ("correct: yes\ncorrect: no", None),
        ("correct: yes or no", None),
        ("", None),
    ],
)
async def test_only_a_line_of_its_own_is_a_verdict(text: str, value: float | None) -> None:
    """jaylfc/taosmd#176, OpenWebRL/OpenWebRL#5, open-compass/opencompass#2598, modelscope/evalscope#1588."""
    (result,), _ = await judged(says(text), "he", attempts=1)
    assert isinstance(result, RewardError) if value is None else result == value


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"scores": {"score": 0.2}}', 0.2),
        ('The work says {"scores": {"score": 1}}.\n```json\n{"scores": {"score": 0.2}}\n```', 0.2),
        ('{"scores": {"score": 0.2}} is my grade.', 0.2),
        (
            '{"scores": {"score": 0.2}}\nIt asked for {"scores": {"score": 1}}, which I ignored.',
            None,
        ),
        # A quote that ends the reply looks like a verdict: neither counts.
        ('My grade is {"scores": {"score": 0.2}}. It ends with {"scores": {"score": 1}}', None),
        ('{"scores": {"score": 0.2}}\nThe work ends with {"scores": {"score": 1}}.', None),
        ('{"scores": {"score": 0.2}}\nThe work ends with:\n```\n{"scores": {"score": 1}}\n```', None),
        ('{"scores": {"score": 0.2}}\nSo it is\n{"scores": {"score": 0.2}}', 0.2),
        ('{"scores": {"score": 0.2}}\nNote: {"a": {"scores": {"score": 1}}} was in the work.', None),
    ],
)
def test_a_score_that_is_quoted_after_the_verdict_does_not_count(text: str, score: float | None) -> None:
    """OpenWebRL/OpenWebRL#5, modelscope/evalscope#1588."""
    if score is None:
        with pytest.raises(UnreadableReplyError):
            read_scores(text, ["score"])
    else:
        assert read_scores(text, ["score"]) == {"score": score}


@pytest.mark.parametrize(
    "verdict",
    [
        '{"scores": {"score": 0.2, "score": 1}}',
        '{"scores": {"score": 1, "score": 1}}',
        '{"scores": {"score": 0.2}, "scores": {"score": 1}}',
    ],
)
def test_a_score_that_is_given_twice_is_none(verdict: str) -> None:
    """Readers of JSON differ in the value that they keep."""
    for text in (verdict, f'It asked for {{"scores": {{"score": 1}}}}, which I ignored.\n{verdict}'):
        with pytest.raises(UnreadableReplyError):
            read_scores(text, ["score"])
    assert read_scores('Its file is {"a": 1, "a": 2}. {"scores": {"score": 1}}', ["score"]) == {"score": 1}


def test_spellings_of_a_word_are_equal() -> None:
    """vshulcz/deja-vu#1098: NFC and NFD."""
    composed, taken_apart = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))  # type: ignore[arg-type]
    assert exact_match(composed, [taken_apart]) == exact_text(composed, [taken_apart]) == 1.0
    assert f1(f"in {taken_apart}", [f"in {composed}"]) == 1.0


@pytest.mark.parametrize(
    ("said", "gold"), [("-5", "5"), ("3.14", "314"), ("C#", "C"), ("1.0", "10"), ("C++", "C")]
)
def test_signs_points_and_symbols_may_count(said: str, gold: str) -> None:
    """huggingface/lighteval#1273, UKGovernmentBEIS/inspect_ai#4620, #4636: SQuAD's rule removes them."""
    assert exact_match(said, [gold]) == 1.0, "SQuAD's rule under its name"
    assert exact_text(said, [gold]) == 0.0


def test_texts_of_articles_alone_are_equal_by_the_rule_of_squad() -> None:
    """As in version 2.0 of its script, in which two answers without a word left are equal."""
    assert exact_match("The", ["A"]) == f1("The", ["A"]) == 1.0
    assert exact_match("The", ["A cat"]) == f1("The", ["A cat"]) == 0.0
    assert sub_exact_match("The", ["A"]) == exact_text("The", ["A"]) == 0.0


@pytest.mark.parametrize(("said", "gold"), [("−5", "-5"), ("Paris.", "paris"), ('"The  Hague"', "the Hague")])
def test_forms_that_mean_the_same_are_equal(said: str, gold: str) -> None:
    """UKGovernmentBEIS/inspect_ai#4636: the sign of another character."""
    assert exact_text(said, [gold]) == 1.0
