r"""Reads a number from a model's output and reports which of four extractors found it.

The extractors in their order: the last `#### number`, the last balanced `\boxed{…}`, the last 'answer is …'
or 'A: …', the last number of the text. The first whose marker is followed by a digit decides. It reads the
number whole, or the answer is unreadable: no part of a list, a range, an expression or a number in an
unknown notation counts. Numbers are exact fractions; `$`, `%` and units are ignored. Each extractor takes
linear time for any text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from tidegate.envs.notation import (
    CURRENCY,
    NUMBER,
    is_whole,
    plain,
    unwrapped,
    value_of,
    without_words,
)

PHRASE = 300
"""Characters after a marker that must contain the whole number."""

MARKERS = 50
"""Number of markers, from the last one back, that are tried."""

_HASH = re.compile(r"####")
_ANSWER_IS = re.compile(r"(?i:\banswer[\s*_]{0,4}(?:is|:|=))|\bA:")
_BOX = re.compile(r"\\f?boxed\s{0,4}\{|\\fbox\s{0,4}\{|\\[{}]|[{}]")
# Text allowed between a marker and its number: blanks, emphasis, maths brackets, an equals sign.
_OPENING = re.compile(r"(?:[\s*_:=~≈(]|\\[(\[]|\$(?=[\s\\$(+-])|\$\$)*")
_BRACKETS = re.compile(r"\A\(([^()]*)\)\Z")
_POINT = re.compile(r"(?<!\.)\.\Z")
_MINUS = re.compile(r"\A[-+][ \u2009]+")
_OPERATOR = re.compile(r"\s*(?:[-+/×÷=^·]|!\s*=|\*{1,2}\s*[0-9])")
_ANOTHER = re.compile(r"=.*(?:[,;]|\b(?:and|or)\b)[\s}]*[A-Za-z](?:_\w{1,9})?\s*\Z", re.DOTALL)
"""The text before an equals sign that gives another value to a variable: `x = 2 or x`."""
_SENTENCE_END = re.compile(r"[.!?](?!\s*=)(?:\s|$)|\n")
# The beginning of a number, as opposed to a heading.
_STARTS = re.compile(rf"[-+.$€£¥₹⦃0-9<>≤≥]|\\|(?i:negative|minus)\b|{CURRENCY}[-+]?[0-9.⦃]")
_DIGIT = re.compile(r"(?<![A-Za-z_])[0-9⦃]")
"""A digit that is not part of a name such as x2."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A number with the name of the extractor that found it."""

    extractor: str
    value: Fraction


def read_answer(text: str | None) -> ParsedAnswer | None:
    """Returns the answer by the first extractor that finds one; None if there is none or it is unreadable."""
    if not text:
        return None
    for name, extract in EXTRACTORS.items():
        found = extract(text)
        if found is not None:
            return ParsedAnswer(name, found) if isinstance(found, Fraction) else None
    return None


def number(text: str) -> Fraction | None:
    """Returns the value of a text that is only a number (and `,`, `$`, `%`, blanks); else None."""
    bare = _MINUS.sub("-", plain(text.strip().rstrip("%").rstrip()).strip(), count=1)
    match = NUMBER.fullmatch(bare)
    return None if match is None else value_of(match)


def gold(text: str) -> Fraction | None:
    """Returns the value of a right answer: after a marker, or the only number of a text; else None."""
    if (value := number(text)) is not None:
        return value
    for name, extract in EXTRACTORS.items():
        if name != "last_number" and (found := extract(text)) is not None:
            return found if isinstance(found, Fraction) else None
    found = _only(unwrapped(plain(text)), strict="!" in text)  # a factorial
    return found if isinstance(found, Fraction) else None


class Unreadable:
    """The result of an extractor that finds an answer which is not one number."""


UNREADABLE = Unreadable()
Found = Fraction | Unreadable | None


def _after_hash(text: str) -> Found:
    """Reads what follows the last `####` before a number: a heading `#### Step 2` does not count."""
    for phrase in _phrases(_HASH, text):
        line = unwrapped(phrase[_opening(phrase) :].partition("\n")[0])
        if _STARTS.match(line) and "\\boxed" not in line and "\\fbox" not in line:
            return _stated(line)
    return None


def _boxed(text: str) -> Found:
    """Reads the last balanced `\\boxed{…}` or `\\fbox{…}` that is not empty."""
    boxes = sorted(((start, end) for start, end in _boxes(text) if text[start:end].strip()), reverse=True)
    if not boxes:
        return None
    start, end = boxes[0]
    if end - start > PHRASE:
        return UNREADABLE
    left, _, right = plain(text[start:end]).rpartition("=")
    if ("=" in left and "," in left + right) or _ANOTHER.search(unwrapped(left)):
        return UNREADABLE  # several variables
    content = _MINUS.sub("-", _BRACKETS.sub(r"\1", _POINT.sub("", right.strip())).strip(), count=1)
    if _DIGIT.search(bare := without_words(content)) and _only(bare) is UNREADABLE:
        return UNREADABLE  # `42 \\text{ in 2 days}` is 42, but `42, 43` is no number
    return _stated(unwrapped(content).strip(), strict=True)


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yields the start and end of the balanced boxes' contents, in one pass over the text."""
    open_braces: list[int | None] = []
    for match in _BOX.finditer(text):
        sign = match[0]
        if "box" in sign:
            open_braces.append(match.end())
        elif sign == "{":
            open_braces.append(None)
        elif sign == "}" and open_braces and (start := open_braces.pop()) is not None:
            yield start, match.start()


def _answer_is(text: str) -> Found:
    """Reads the sentence after the last 'answer is' or 'A:' that has a digit."""
    for phrase in _phrases(_ANSWER_IS, text):
        rest = unwrapped(phrase[_opening(phrase) :])
        end = _SENTENCE_END.search(rest)
        sentence = rest[: end.start()] if end else rest
        if _DIGIT.search(sentence):
            return _stated(sentence)
    return None


def _last_number(text: str) -> Found:
    text = unwrapped(plain(text))
    last = deque(_DIGIT.finditer(text), maxlen=1)
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    if not numbers or numbers[0].end() <= last[0].start() or not is_whole(numbers[0], listed=False):
        return UNREADABLE
    return _known(value_of(numbers[0]))


EXTRACTORS: dict[str, Callable[[str], Found]] = {
    "hash": _after_hash,
    "boxed": _boxed,
    "answer_is": _answer_is,
    "last_number": _last_number,
}
"""Name → extractor, in the order in which they are tried."""


def _phrases(marker: re.Pattern[str], text: str) -> Iterator[str]:
    """Yields the text after each marker, from the last one back."""
    ends = deque((match.end() for match in marker.finditer(text)), maxlen=MARKERS)
    for end in reversed(ends):
        phrase = text[end : end + PHRASE]
        # A number that the limit cuts would be another number.
        yield plain(phrase if end + PHRASE >= len(text) else phrase.rstrip("0123456789.,"))


def _opening(phrase: str) -> int:
    match = _OPENING.match(phrase)
    return match.end() if match else 0


def _stated(phrase: str, strict: bool = False) -> Found:
    """Reads the result that a phrase states: 8 for `5 + 3 = 8 apples`, 42 for `42, as 6 * 7 = 42`."""
    phrase = _MINUS.sub("-", phrase[_opening(phrase) :], count=1)
    first = NUMBER.match(phrase, _opening(phrase))
    if first is not None and not _OPERATOR.match(phrase, first.end()):
        return _known(value_of(first)) if is_whole(first, strict=strict) else UNREADABLE
    head, equals, result = phrase.rpartition("=")
    if equals:
        if _ANOTHER.search(head):
            return UNREADABLE
        return _stated(result.strip(), strict) if _DIGIT.search(result) else _stated(head.strip(), strict)
    return _only(phrase, strict)


def _only(text: str, strict: bool = True) -> Found:
    """Reads the only number of a text."""
    if _DIGIT.search(text) is None and NUMBER.search(text) is None:
        return UNREADABLE
    matches = list(NUMBER.finditer(text))
    if len(matches) != 1 or not is_whole(matches[0], strict=strict):
        return UNREADABLE
    start, end = matches[0].span()
    outside = f"{text[:start]} {text[end:]}"
    return UNREADABLE if _DIGIT.search(outside) else _known(value_of(matches[0]))


def _known(value: Fraction | None) -> Found:
    return UNREADABLE if value is None else value
