"""Notations of numbers: each is read whole or not at all, in outputs and right answers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from tests.unit.envs.test_answers import GIVEN
from tidegate.envs.answers import read_answer
from tidegate.envs.grading.graders import contains, exact_match, math_verify, numeric
from tidegate.envs.rewards import Reward, exact_answer, final_number
from tidegate.errors import RewardError

VALUES = {
    "1000": ["1 000", "1\u2009000", "1\u202f000", "1{,}000", r"1\,000", r"1,\!000", r"1\ 000", "1'000",
             "1_000"],
    "1234567": ["1,234,567", "12,34,567", "1\u00a0234\u00a0567", r"1{,}234{,}567"],
    "7/4": ["1 3/4", r"1\frac{3}{4}", "1¾", "1 and 3/4", r"\frac74", r"\dfrac{7}{4}", r"{7 \over 4}",
            "7⁄4", "1.75"],
    "-3/4": ["-3/4", "3/-4", "−3/4", r"\frac{-3}{4}", r"-\frac{3}{4}", r"\frac{3}{-4}", "-0.75", "minus 3/4"],
    "5": ["$5", r"\$5", "US$5", "5 USD", "Rs. 5", "5%", r"5\%", "5 percent", "5 m/s", "5 km/h",
          r"5\text{ cm}"],
    "5/1": ["5 cm^2", "5 cm²", r"5\,\text{cm}^2", "5°", r"5^\circ", "5 kg", "5kg", "5.", "5.0", "+5",
            "5th", "005"],
    "-5": ["-$5", "$-5", "−5", "–5", "－5", "negative 5", "Minus 5", "-5 °C"],
    "30000": [r"3 \times 10^4", "3×10⁴", r"3 \cdot 10^{4}", "3e4", "3E+4", "30 thousand", "3 x 10^4"],
    "1/1000": ["10^{-3}", "10⁻³", "1e-3", ".001"],
    "1024": ["2^{10}", "2^10", "2**10"],
    "24": ["2 dozen", "2 dozen eggs"],
    "300000": ["3 lakh", "3 hundred thousand", "0.03 crore"],
    "3000000": ["3 million", "$3 million", "3,000,000", r"3\text{ million}"],
}  # fmt: skip
UNREADABLE = [
    "3-5", "3–5", "3 to 5", "3 or 4", "3, 4", "3 and 4", "3 ± 1", "3:45", "2020-01-05", "3/4/2020", "12 34",
    "1,2", "3,14", "1.234,56", "1.234.567", "0,5", "1.2.3", "1,0000", "1234,567", "1,23,4", "1 000 00",
    "3..5",
    "4 10/3", "5/0", r"\frac{1}{0}", "2/3/4", r"3\sqrt{2}", r"\sqrt{16}", r"2\pi", "5x", "2^n", "5k", "0x1F",
    "10 + 3", "10 - 3", "3 × 5", "2 and a half", "5 halves", "0.333...", "10^{9999}", "1e9999", "9" * 150,
    "5 feet 3 inches", "3 hours 20 minutes", "2h30m", "4°30′", "--5", "5+", "0xff", "3.2 bn", "4 mn",
    "5 squared", "5 cubed", "2 to the power of 5",
    "4 over 5", "4 tenths", "3 hundredths", "1 fifth", "5 tens", "4 pi",
    "5 more than 3", "2 percent of 50", "50% of 20", "> 5",
]  # fmt: skip
FORMS = ["#### {}", "I got 7. Thus \\boxed{{{}}}.", "I got 7. The answer is {}.", "I got 7, so it is {}"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", VALUES)
def test_a_number_is_read_whole(value: str, form: str) -> None:
    """huggingface/Math-Verify#3, #34, #81, opensanctions/followthemoney#331, Khan/khan-exercises#129156,
    EleutherAI/lm-evaluation-harness#3214, #3254, open-compass/opencompass#2343, #2426."""
    for notation in VALUES[value]:
        found = read_answer(form.format(notation))
        assert found is not None, notation
        assert found.value == Fraction(value), notation
        assert Reward("r", numeric)({**GIVEN, "output": f"#### {value}", "answer": notation}) == 1.0, notation


@pytest.mark.parametrize("notation", UNREADABLE)
def test_a_part_of_another_notation_is_not_read(notation: str) -> None:
    """huggingface/Math-Verify#81, opensanctions/followthemoney#331: a part counted as the number."""
    for form in FORMS:
        assert read_answer(form.format(notation)) is None, form
    with pytest.raises(RewardError, match="is not one number"):
        Reward("r", numeric)({**GIVEN, "output": "5", "answer": notation})


@pytest.mark.parametrize("value", VALUES)
def test_exact_answer_reads_the_same_numbers(value: str) -> None:
    """huggingface/Math-Verify#81, Khan/khan-exercises#129156."""
    for notation in VALUES[value]:
        assert final_number(f"So\n#### {notation}") == Fraction(value), notation
        assert exact_answer(f"#### {notation}", value) == exact_answer(f"#### {value}", notation) == 1.0, (
            notation
        )


@pytest.mark.parametrize("notation", UNREADABLE)
def test_exact_answer_reads_no_part(notation: str) -> None:
    """huggingface/Math-Verify#81, opensanctions/followthemoney#331: a part counted as the number."""
    assert final_number(f"#### 7\n#### {notation}") is None
    for answer in (notation, f"#### {notation}"):
        with pytest.raises(RewardError, match="is not one number"):
            exact_answer("#### 5", answer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\boxed{x = 2 \text{ or } x = 5}", None),
        ("The answer is x = 4 or x = -4", None),
        ("The answer is x = 4, y = 5", None),
        *((f"The answer is {text}", None) for text in ("twice 5", "half of 10", "not 6")),
        *((f"So it is {text}", None) for text in ("twice 5", "half of 10", "not 6")),
        ("The answer is 3! = 6", 6),
        ("The answer is 18 (9 x 2)", 18),
        ("So 18 (9 x 2)", None),
        ("The answer is 4, not 5.", 4),
        ("The answer is 4 third graders", 4),
        ("The answer is 4 quarters", 4),
        ("The answer is 50% of the students", 50),
        ("The answer is no more than 5", 5),
        ("The answer is 5 + 3 = 8 and 8 * 2 = 16", 16),
    ],
)
def test_words_around_a_number(text: str, value: int | None) -> None:
    """Forms of GSM8K's and MATH's replies in which a number beside the answer was read"""
    found = read_answer(text)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize("answer", ["5!", "> 5", "half of 5", "3 tenths", "4 pi", "twice 5", "5 squared"])
def test_a_right_answer_of_which_a_number_is_a_part_is_an_error(answer: str) -> None:
    with pytest.raises(RewardError, match="is not one number"):
        numeric("5", answer)


def test_composed_and_decomposed_letters_are_equal() -> None:
    for composed, decomposed in (
        ("Café", "Cafe\u0301"),
        ("ΐ", "ι\u0308\u0301"),
        ("한", "\u1112\u1161\u11ab"),
    ):
        for output, answer in ((composed, decomposed), (decomposed, composed)):
            assert exact_match(output, answer) == 1.0
            assert contains(f"In {output.upper()}.", [answer]) == 1.0
    assert exact_match("Cafe", "Café") == contains("Cafe", "Café") == 0.0


@pytest.mark.parametrize(
    "box",
    [
        "x > 5", "5x", "n+3", "x-3", r"\text{none}", r"\text{A}", "|5|", "5!", "f(5)", "(1,2)", "x=2,y=3",
        r"\{3,4\}", "12:30", r"5 \text{ and } 6", r"\text{5 to 6}",
    ],
)  # fmt: skip
def test_a_rejected_box_does_not_fall_through(box: str) -> None:
    """PrimeIntellect-ai/verifiers#1028: a number elsewhere in the text counted instead of the box."""
    assert read_answer(f"It is 7. The answer is 7. \\boxed{{{box}}} 7") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The total is 72 clips, altogether.", "72"),  # jundot/omlx#3484
        ("The answer is 72, in total, so the farmer earns that much.", "72"),  # stanford-crfm/helm#4337
        ("The total cost of the order is $29.00.", "29"),  # EleutherAI/lm-evaluation-harness#3214
        (r"**Profit: \$200,000**", "200000"),  # open-compass/opencompass#2426
        (r"<answer>\boxed{\frac{1}{2}}</answer>", "1/2"),  # AI-Hypercomputer/maxtext#4150
        (r"\fbox{\frac{1}{2}}", "1/2"),  # THUDM/slime#2150, OpenRLHF/OpenRLHF#1285
        ("472/10,000", "0.0472"),  # Khan/khan-exercises#129156
        (r"\boxed{3} or \boxed{4}", "4"),
        (r"\boxed{5}, as asked in \boxed{}", "5"),
        (r"\boxed{\left(-\frac{1}{2}\right)}", "-1/2"),
        (r"\boxed{\$1,234.00}", "1234"),
        ("There are 5 kg of CO2", "5"),
        ('{"answer": 42}', "42"),
        ("Then:\n- 3 apples", "3"),
    ],
)
def test_answers_of_reports(text: str, value: Any) -> None:
    """The threads beside the texts."""
    found = read_answer(text)
    assert found is not None
    assert found.value == Fraction(value)


@pytest.mark.parametrize("grader", [contains, exact_match, numeric, exact_answer])
@pytest.mark.parametrize("answer", [None, [], "", " ", ["5", None], ["5", ""]])
def test_a_reward_without_a_right_answer_is_an_error(grader: Any, answer: Any) -> None:
    """A text contains the empty one, and `None` is the text of None."""
    for output in ("None", "#### 5", ""):
        with pytest.raises(RewardError, match=r"right answer|is not one number"):
            grader(output, answer)


@pytest.mark.parametrize("answer", ["a\nb", "$$", r"\text{}", ["5", "\\"]])
def test_a_right_answer_that_math_verify_cannot_read_is_an_error(answer: Any) -> None:
    """Every output had the reward 0."""
    pytest.importorskip("math_verify")
    for output in ("5", "", "a\nb"):
        with pytest.raises(RewardError, match=r"math-verify: the right answer '.*' cannot be read; write it"):
            math_verify(output, answer)
