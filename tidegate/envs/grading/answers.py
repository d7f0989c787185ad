r"""Reading a number out of what a model wrote, and which of four ways found it.

The ways, in the order in which they are tried: the last `#### number`, the last balanced `\boxed{…}`, the
last 'answer is …' or 'A: …', the last number of the text. A way that finds no number passes on to the
next. Numbers are exact fractions; `,`, `$`, `%` and units don't count.

Each way takes time in proportion to the text's length, whatever is in it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

PHRASE = 200
"""Characters after a marker in which its number must be; a longer number is none."""

MARKERS = 50
"""How many markers, from the last one back, are looked at for a number."""

# Only single characters are repeated possessively: Python before 3.11.5 reads possessive groups wrongly.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100}+)"
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]{{1,100}}+)?|\.[0-9]{{1,100}}+)"
# Digits, a fraction 3/4, a mixed number 1 3/4, or LaTeX's \frac{3}{4}, with an optional sign and currency.
# What stands around it must not make it another number: 1.2.3, 3/4/2020, 1e5 and 1e-5 are none.
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
_SAID = re.compile(r"(?i:\banswer[\s*_]{0,4}(?:is|:|=))|\bA:")
_BOX = re.compile(r"\\boxed\s{0,4}\{|\\[{}]|[{}]")
# Between a marker and its number: blanks, emphasis, maths brackets, an equals sign.
_OPENING = re.compile(r"(?:[\s*_:=~≈(]|\\[(\[]|\$(?=[\s\\$(-])|\$\$)*")
_SPACING = re.compile(r"\\[,;:!> ]|\^\s?(?:\\circ|\{\\circ\})")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s?\{([^{}]*)\}")
_MINUS = re.compile(r"[-−]\s+")
_OPERATOR = re.compile(r"\s*(?:[-−+*/×÷=^]|\\(?:times|cdot|div))")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A number that was read, and the extractor that read it."""

    extractor: str
    value: Fraction


def read_answer(text: str | None) -> ParsedAnswer | None:
    """The answer that a text gives, by the first way that finds one; None where it holds no number."""
    if not text:
        return None
    for name, extract in EXTRACTORS.items():
        value = extract(text)
        if value is not None:
            return ParsedAnswer(name, value)
    return None


def number(text: str) -> Fraction | None:
    """A text that is one number and nothing else (`,`, `$`, `%` and blanks aside); None otherwise."""
    bare = text.strip().rstrip("%").rstrip()
    match = _NUMBER.fullmatch(bare)
    return None if match is None else _value(match)


def _after_hash(text: str) -> Fraction | None:
    """The number right after the last `####` that has one: a heading `#### Step 2` has none."""
    for phrase in _phrases(_HASH, text):
        line = _MINUS.sub("-", phrase[_opening(phrase) :].partition("\n")[0], count=1)
        if _NUMBER.match(line):
            return _stated(line)
    return None


def _boxed(text: str) -> Fraction | None:
    """The number in the last `\\boxed{…}` whose braces balance and that holds one number."""
    for start, end in sorted(_boxes(text), reverse=True)[:MARKERS]:
        if end - start > PHRASE:
            continue
        box = _SPACING.sub(" ", text[start:end].replace("{,}", ",")).rpartition("=")[2]
        # `42 \text{ in 2 days}` is 42; only where the words are all there is do they count.
        for content in (_WORDS.sub(" ", box), _WORDS.sub(r"\1", box)):
            found = list(_NUMBER.finditer(content))
            if len(found) == 1 and (value := _value(found[0])) is not None:
                return value
    return None


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Where the contents of the balanced boxes lie; one pass over the text."""
    open_braces: list[int | None] = []
    for match in _BOX.finditer(text):
        sign = match[0]
        if sign.startswith("\\boxed"):
            open_braces.append(match.end())
        elif sign == "{":
            open_braces.append(None)
        elif sign == "}" and open_braces and (start := open_braces.pop()) is not None:
            yield start, match.start()


def _said(text: str) -> Fraction | None:
    """The number of the sentence after the last 'answer is' or 'A:' that has one."""
    for phrase in _phrases(_SAID, text):
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
    "answer_is": _said,
    "last_number": _last_number,
}
"""Name → way, in the order in which they are tried."""


def _phrases(marker: re.Pattern[str], text: str) -> Iterator[str]:
    """What follows each marker, from the last one back."""
    ends = deque((match.end() for match in marker.finditer(text)), maxlen=MARKERS)
    return (text[end : end + PHRASE] for end in reversed(ends))


def _opening(phrase: str) -> int:
    match = _OPENING.match(phrase)
    return match.end() if match else 0


def _stated(phrase: str) -> Fraction | None:
    """The number that a phrase states: `5 + 3 = 8 apples` states 8, `42, as 6 * 7 = 42` states 42."""
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
    """The exact value of a match; None for a division by zero."""
    if _by_zero(match):
        return None
    read = match.groupdict()
    sign = -1 if read["sign"] and read["sign"][0] in "-−" else 1
    if read["top"]:
        over, under, whole = Fraction(read["top"]), Fraction(read["bottom"]), Fraction(0)
    elif read["whole"]:
        over, under, whole = Fraction(read["part"]), Fraction(read["of"]), Fraction(read["whole"])
    else:
        over, under, whole = _plain(read["value"]), _plain(read["divisor"] or "1"), Fraction(0)
    return sign * (whole + over / under)


def _by_zero(match: re.Match[str]) -> bool:
    under = match["bottom"] or match["of"] or match["divisor"]
    return under is not None and not under.strip("0.,")


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
