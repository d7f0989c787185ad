"""A calculator for agents: numbers, `+ - * /` and parentheses; exact, and safe with any input."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200
"""Limit of an expression in characters; it bounds time, recursion and the size of the result."""

DIGITS = "0123456789"
_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(\S))")


def calculate(expression: str) -> str:
    """Returns the value as text: `(12 + 3) / 4` gives `3.75`; infinite decimals are rounded to four places.

    Raises ValueError with a message for the model.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_TOKEN.findall(expression.replace("×", "*").replace("÷", "/").replace("−", "-")))
    value = parser.sum()
    if parser.next is not None:
        raise ValueError(f"unexpected {parser.next!r} in {expression!r}")
    return _as_text(value)


class _Parser:
    """Recursive-descent parser with the levels sum, product and factor."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [number or sign for number, sign in tokens]
        self._at = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def take(self, signs: str) -> str | None:
        sign = self.next
        if sign is None or sign not in signs:
            return None
        self._at += 1
        return sign

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.take("+-"):
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while sign := self.take("*/"):
            factor = self.factor()
            if sign == "/" and factor == 0:
                raise ValueError("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def factor(self) -> Fraction:
        if sign := self.take("+-"):
            return self.factor() if sign == "+" else -self.factor()
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed")
            return value
        number = self.next
        if number is None:
            raise ValueError("the expression ends too early")
        if number[-1] not in DIGITS and number[0] not in DIGITS:
            raise ValueError(f"unexpected {number!r}; only numbers, + - * / and parentheses are understood")
        self._at += 1
        return Fraction(number)


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    places = len(str(value.denominator)) * 4 if rest == 1 else 4
    digits = str(round(abs(value) * 10**places)).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and text != "0" else text
