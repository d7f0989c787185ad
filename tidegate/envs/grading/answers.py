r"""Reads a number from a model's output and reports which of four extractors found it.

The extractors in their order: the last `#### number`, the last balanced `\boxed{…}`, the last 'answer is …'
or 'A: …', the last number of the text. If one finds no number, the next is tried. Numbers are exact
fractions; `,`, `$`, `%` and units are ignored. Each extractor takes linear time for any text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

PHRASE = 200
"""Characters after a marker that must contain the whole number."""

MARKERS = 50
"""Number of markers, from the last one back, that are tried."""

# Only single characters have possessive quantifiers: Python before 3.11.5 matches possessive groups wrongly.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100}+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]{{1,100}}+)?|\.[0-9]{{1,100}}+)"
# Digits, a fraction 3/4, a mixed number 1 3/4, or LaTeX's \frac{3}{4}, with an optional sign and currency.
# The look-arounds reject other forms: 1.2.3, 3/4/2020, 1e5, 1e-5.
_NUMBER = re.compile(
    rf"""
    (?<![\w])(?<![0-9][.,/])(?<![0-9.][eE][-+−])
    (?P<sign>(?<![\w)\]}}])[-−+](?:\ ?(?=[\\$€£]))?)?
    (?:\\?[$€£]\ ?)?
    (?:
        \\[dt]?frac\{{(?P<top>[0-9]{{1,100}}+)\}}\{{(?P<bottom>[0-9]{{1,100}}+)\}}
      | (?P<whole>[0-9]{{1,100}}+)\ (?P<part>[0-9]{{1,100}}+)/(?P<of>[0-9]{{1,100}}+)
      | (?P<value>{_UNSIGNED})(?:\ ?/\ ?(?P<divisor>{_UNSIGNED})|(?!\ ?/\ ?\.?[0-9]))
    )
    (?!(?:[.,/]|\ /\ )?[0-9]|[eE][-+]?[0-9])
    """,
    re.VERBOSE,
)
_HASH = re.compile(r"####")
_ANSWER_IS = re.compile(r"(?i:\banswer[\s*_]{0,4}(?:is|:|=))|\bA:")
_BOX = re.compile(r"\\boxed\s{0,4}\{|\\[{}]|[{}]")
# Text allowed between a marker and its number: blanks, emphasis, maths brackets, an equals sign.
_OPENING = re.compile(r"(?:[\s*_:=~≈(]|\\[(\[]|\$(?=[\s\\$(-])|\$\$)*")
_SPACING = re.compile(r"\\[,;:!> ]|\^\s?(?:\\circ|\{\\circ\})")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s?\{([^{}]*)\}")
_MINUS = re.compile(r"[-−]\s+")
_OPERATOR = re.compile(r"\s*(?:[-−+*/×÷=^]|\\(?:times|cdot|div))")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A number with the name of the extractor that found it."""

    extractor: str
    value: Fraction


def read_answer(text: str | None) -> ParsedAnswer | None:
    """Returns the answer by the first extractor that finds one; None if the text contains no number."""
    if not text:
        return None
    for name, extract in EXTRACTORS.items():
        value = extract(text)
        if value is not None:
            return ParsedAnswer(name, value)
    return None


def number(text: str) -> Fraction | None:
    """Returns the value of a text that is only a number (and `,`, `$`, `%`, blanks); else None."""
    bare = text.strip().rstrip("%").rstrip()
    match = _NUMBER.fullmatch(bare)
    return None if match is None else _value(match)


def _after_hash(text: str) -> Fraction | None:
    """Returns the number after the last `####` that a number follows: a heading `#### Step 2` does not
    count."""
    for phrase in _phrases(_HASH, text):
        line = _MINUS.sub("-", phrase[_opening(phrase) :].partition("\n")[0], count=1)
        if _NUMBER.match(line):
            return _stated(line)
    return None


def _boxed(text: str) -> Fraction | None:
    """Returns the number in the last balanced `\\boxed{…}` that contains exactly one number."""
    for start, end in sorted(_boxes(text), reverse=True)[:MARKERS]:
        if end - start > PHRASE:
            continue
        box = _SPACING.sub(" ", text[start:end].replace("{,}", ",")).rpartition("=")[2]
        # `42 \text{ in 2 days}` is 42; the words are read only if there is no number outside them.
        for content in (_WORDS.sub(" ", box), _WORDS.sub(r"\1", box)):
            matches = list(_NUMBER.finditer(content))
            if len(matches) == 1 and (value := _value(matches[0])) is not None:
                return value
    return None


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yields the start and end of the balanced boxes' contents, in one pass over the text."""
    open_braces: list[int | None] = []
    for match in _BOX.finditer(text):
        sign = match[0]
        if sign.startswith("\\boxed"):
            open_braces.append(match.end())
        elif sign == "{":
            open_braces.append(None)
        elif sign == "}" and open_braces and (start := open_braces.pop()) is not None:
            yield start, match.start()


def _answer_is(text: str) -> Fraction | None:
    """Returns the number of the sentence after the last 'answer is' or 'A:' that contains one."""
    for phrase in _phrases(_ANSWER_IS, text):
        rest = phrase[_opening(phrase) :]
        end = _SENTENCE_END.search(rest)
        value = _stated(rest[: end.start()] if end else rest)
        if value is not None:
            return value
    return None


def _last_number(text: str) -> Fraction | None:
    last = None
    for match in _NUMBER.finditer(text):
        if not _by_zero(match):
            last = match
    return None if last is None else _value(last)


EXTRACTORS: dict[str, Callable[[str], Fraction | None]] = {
    "hash": _after_hash,
    "boxed": _boxed,
    "answer_is": _answer_is,
    "last_number": _last_number,
}
"""Name → extractor, in the order in which they are tried."""


def _phrases(marker: re.Pattern[str], text: str) -> Iterator[str]:
    """Yields the text after each marker, from the last one back."""
    ends = deque((match.end() for match in marker.finditer(text)), maxlen=MARKERS)
    return (text[end : end + PHRASE] for end in reversed(ends))


def _opening(phrase: str) -> int:
    match = _OPENING.match(phrase)
    return match.end() if match else 0


def _stated(phrase: str) -> Fraction | None:
    """Returns the result that a phrase states: 8 for `5 + 3 = 8 apples`, 42 for `42, as 6 * 7 = 42`."""
    first = _NUMBER.match(phrase)
    if first is not None and not _OPERATOR.match(phrase, first.end()):
        return _value(first)
    head, equals, result = phrase.rpartition("=")
    for part in (result, head) if equals else (phrase,):
        match = _NUMBER.search(part)
        if match is not None and (value := _value(match)) is not None:
            return value
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """Returns the exact value of a match, None for a division by zero."""
    if _by_zero(match):
        return None
    groups = match.groupdict()
    sign = -1 if groups["sign"] and groups["sign"][0] in "-−" else 1
    integer = Fraction(0)
    if groups["top"]:
        numerator, denominator = Fraction(groups["top"]), Fraction(groups["bottom"])
    elif groups["whole"]:
        integer = Fraction(groups["whole"])
        numerator, denominator = Fraction(groups["part"]), Fraction(groups["of"])
    else:
        numerator, denominator = _plain(groups["value"]), _plain(groups["divisor"] or "1")
    return sign * (integer + numerator / denominator)


def _by_zero(match: re.Match[str]) -> bool:
    denominator = match["bottom"] or match["of"] or match["divisor"]
    return denominator is not None and not denominator.strip("0.,")


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
