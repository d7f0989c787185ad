"""The calculator: exact, bounded, and no exception except ValueError for any input."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.agents.calculator import MAX_LENGTH, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12", "12"),
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("10 - 3 - 2", "5"),
        ("16 / 4 / 2", "2"),
        ("-3 + +5", "2"),
        ("2*-3", "-6"),
        ("0.1 + 0.2", "0.3"),
        ("1/1024", "0.0009765625"),
        ("1/3", "0.3333"),
        ("-2/3", "-0.6667"),
        ("1 / 100000", "0.00001"),
        ("1 / 30000 / 10", "0"),
        ("7 × 6 ÷ 2 − 1", "20"),
        (" ( ( 4 ) ) ", "4"),
        ("3.", "3"),
        (".5*2", "1"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "ends too early"),
        ("5 -", "ends too early"),
        ("(1 + 2", "not closed"),
        ("1 + 2)", "unexpected '\\)'"),
        ("1 2", "unexpected '2'"),
        ("x + 1", "unexpected 'x'"),
        ("2 ** 100", "unexpected '\\*'"),
        (".", "unexpected '\\.'"),
        ("1 / (2 - 2)", "division by zero"),
        ("__import__('os')", "unexpected '_'"),
        ("٣ + ٤", "unexpected"),
        ("1" * (MAX_LENGTH + 1), "longer than"),
    ],
)
def test_errors_are_words_for_a_model(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


def expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda one: f"({one[0]} {one[1]} {one[2]})"
        ),
        max_leaves=12,
    )


@given(expressions())
def test_the_calculator_agrees_with_python(expression: str) -> None:
    if len(expression) <= MAX_LENGTH:
        assert Fraction(calculate(expression)) == Fraction(eval(expression))


@given(st.text(alphabet="0123456789.+-*/() x²", max_size=60) | st.text(max_size=40))
def test_the_calculator_raises_only_value_errors(expression: str) -> None:
    with contextlib.suppress(ValueError):
        assert Fraction(calculate(expression)) is not None


@pytest.mark.parametrize("expression", ["(" * 200, "-" * 199 + "1", "9*" * 99 + "9", "1/" * 99 + "7"])
def test_the_most_expensive_expression_takes_no_time(expression: str) -> None:
    began = time.process_time()
    try:
        result = calculate(expression)
    except ValueError:
        result = ""
    assert len(result) < 1000
    assert time.process_time() - began < 0.5
