"""Extraction of numbers from a model's output, and which extractor found each."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.envs.answers import number, read_answer
from tidegate.envs.grading.graders import contains, exact_match, numeric, verl_flexible, verl_strict
from tidegate.envs.rewards import Grade, Reward
from tidegate.errors import RewardError

READ = [
    # the last `#### number`
    ("#### 42", "hash", "42"),
    ("####42", "hash", "42"),
    ("so it is\n#### 42.\nThanks", "hash", "42"),
    ("#### 1\n#### 2", "hash", "2"),
    ("#### 2\n#### none", "hash", "2"),
    ("#### $1,234.50", "hash", "1234.5"),
    ("#### -$3", "hash", "-3"),
    ("#### - 3", "hash", "-3"),
    ("#### −3", "hash", "-3"),
    ("#### 50%", "hash", "50"),
    ("#### .5", "hash", "0.5"),
    ("#### 42 apples", "hash", "42"),
    ("#### 42kg", "hash", "42"),
    ("#### **42**", "hash", "42"),
    ("#### = 42", "hash", "42"),
    ("#### 13/2", "hash", "13/2"),
    ("#### 1 1/2 cups", "hash", "3/2"),
    ("#### 5 + 3 = 8", "hash", "8"),
    ("#### 8\n\\boxed{9}\nthe answer is 10", "hash", "8"),
    # the last balanced box
    (r"#### \boxed{7}", "boxed", "7"),
    (r"\boxed{5} then \boxed{6}, and the answer is 9", "boxed", "6"),
    (r"\boxed{x = 12} and \boxed{9", "boxed", "12"),
    (r"\boxed{\frac{3}{4}}", "boxed", "3/4"),
    (r"\boxed{-\dfrac{3}{4}}", "boxed", "-3/4"),
    (r"\boxed{\$1{,}234.5}", "boxed", "1234.5"),
    (r"\boxed{12\text{ dollars in 2 days}}", "boxed", "12"),
    (r"\boxed{\text{12 dollars}}", "boxed", "12"),
    (r"\boxed{18\%}", "boxed", "18"),
    (r"\boxed{\boxed{5}}", "boxed", "5"),
    # 'answer is', 'A:'
    ("#### Step 2: add\nThe answer is 5", "answer_is", "5"),
    ("The answer is 5 + 3 = 8 apples. Then 4.", "answer_is", "8"),
    ("The answer is 3, because 2 * 3 = 6", "answer_is", "3"),
    ("The final answer is: \n\n $42$.", "answer_is", "42"),
    ("**Answer:** 42 of 50", "answer_is", "42"),
    ("A: 7 of 9", "answer_is", "7"),
    ("the answer is 1. No, the answer is 2. Really 3", "answer_is", "2"),
    (r"answer is $-\frac{1}{2}$", "answer_is", "-1/2"),
    # the last number
    ("a: 7 then 9", "last_number", "9"),
    ("10 - 3 = 7", "last_number", "7"),
    ("it costs $5/hour", "last_number", "5"),
    ("about −7 degrees", "last_number", "-7"),
    ("more than 1,000,000.", "last_number", "1000000"),
]


@pytest.mark.parametrize(("text", "extractor", "value"), READ)
def test_each_way_finds_its_number(text: str, extractor: str, value: str) -> None:
    found = read_answer(text)
    assert found is not None
    assert (found.extractor, found.value) == (extractor, Fraction(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        "nothing",
        "3 or 5/0",
        r"\boxed{3, 4}, so 5",
        "5, then #### 1.2.3",
        "#### 1.2.3",
        "#### 1,2",
        "it is 3/4/2020",
        "x2",
        "٤٢",
        "9" * 150,
    ],
)
def test_what_is_not_one_number_is_not_read(text: str | None) -> None:
    assert read_answer(text) is None


@given(st.integers(-(10**12), 10**12), st.integers(0, 6), st.sampled_from(["{}", "${}", "{}%", "{} apples"]))
def test_written_numbers_come_back_exactly(whole: int, places: int, form: str) -> None:
    value = Fraction(whole, 10**places)
    digits = f"{abs(whole):0{places + 1}d}"
    left, right = (digits[:-places], digits[-places:]) if places else (digits, "")
    written = ("-" if whole < 0 else "") + form.format(f"{int(left):,}" + (f".{right}" if right else ""))
    for text in (f"#### {written}", f"The answer is {written}.", f"so {written}"):
        found = read_answer(text)
        assert found is not None
        assert found.value == value


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{",
        "answer is ",
        "####",
        "1,",
        "- ",
        "{",
        "$",
        "1 ",
        "1/0 ",
        "9",
        "1/",
        "#### - ",
        "A:",
        "⦃",
        "½",
        "1 000 ",
    ],
)
def test_a_long_output_is_read_in_linear_time(text: str) -> None:
    began = time.process_time()
    read_answer(text * (200_000 // len(text)))
    assert time.process_time() - began < 2.0


def test_a_number_by_itself() -> None:
    assert number(" $1,234.50 ") == Fraction("1234.5")
    assert number("50%") == 50
    assert number("about 5") is None
    assert number("") is None


@pytest.mark.parametrize("answer", ["3 or 4", "3-5", "1,5", "2 pi r^2", "5x", "1.2.3", "", True, None])
def test_an_answer_that_is_not_one_number_is_an_error(answer: Any) -> None:
    with pytest.raises(RewardError, match="is not one number"):
        Reward("numeric", numeric)({**GIVEN, "output": "3", "answer": answer})


GIVEN = {"info": {}, "task": None, "messages": [], "trajectory": None}


def test_unparseable_and_wrong_answers_are_counted_separately() -> None:
    reward = Reward("numeric", numeric)
    right, wrong, none = (
        reward.grade({**GIVEN, "output": output, "answer": 18})
        for output in ("\\boxed{18}", "it is 17", "I don't know")
    )
    assert (right.value, right.metrics["extractor/boxed"], right.metrics["unparseable"]) == (1.0, 1.0, 0.0)
    assert (wrong.value, wrong.metrics["extractor/last_number"], wrong.metrics["unparseable"]) == (
        0.0,
        1.0,
        0.0,
    )
    assert (none.value, none.metrics["unparseable"]) == (0.0, 1.0)
    assert sum(none.metrics.values()) == 1.0
    assert reward({**GIVEN, "output": None, "answer": 18}) == 0.0


def test_an_answer_without_a_number_is_an_error_that_says_so() -> None:
    with pytest.raises(RewardError, match=r"'numeric'.*'many' is not one number"):
        Reward("numeric", numeric)({**GIVEN, "output": "3", "answer": "many"})


@pytest.mark.parametrize(
    ("output", "answer", "right"),
    [
        ("#### 0.00001", 1e-05, True),
        ("#### 5", 1e-05, False),
        ("#### 10000000000000000", 1e16, True),
        ("#### 16", 1e16, False),
        ("#### 3", ["3", 5], True),
        ("#### 5", ["3", 5], True),
        ("#### 4", ["3", 5], False),
        ("#### 123456789012345678901234567890", 123456789012345678901234567890, True),
        ("#### 0", "1 000", False),
        ("#### 1000", "1 000", True),
        ("#### 3/4", "\\frac{3}{4}", True),
    ],
)
def test_answers_may_be_numbers_of_any_size_or_several(output: str, answer: Any, right: bool) -> None:
    assert Reward("numeric", numeric)({**GIVEN, "output": output, "answer": answer}) == right


@pytest.mark.parametrize("grade", [verl_strict, verl_flexible])
def test_verls_ways_take_any_of_several_answers(grade: Callable[..., Grade]) -> None:
    assert [grade(f"#### {n}", ["3", 5]).value for n in (3, 5, 4)] == [1.0, 1.0, 0.0]


def test_texts_may_have_several_right_answers() -> None:
    assert exact_match(" Paris\n", "Paris") == 1.0
    assert exact_match("paris", ["Lyon", "Paris"]) == 0.0
    assert exact_match("Paris", ["Lyon", "Paris"]) == 1.0
    assert exact_match(None, "Paris") == 0.0
    assert contains("It is PARIS.", ["Lyon", "Paris"]) == 1.0
    assert contains("It is Rome.", ["Lyon", "Paris"]) == 0.0
    assert contains("It is 12.", 12) == 1.0
