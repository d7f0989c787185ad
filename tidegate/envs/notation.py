r"""The notations of numbers in prose and LaTeX, and the contexts in which a number is part of something else.

`plain` makes the signs, blanks and fractions of a text uniform: a fraction of LaTeX or Unicode becomes
`⦃3⁄4⦄`, so that `1\frac{3}{4}`, `1¾` and `1 3/4` are the same mixed number.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400
"""Largest exponent that is read."""

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺"
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−﹣－‐‑‒–—", "-"), **dict.fromkeys("＋﹢", "+"), **dict.fromkeys("⁄∕／", "/"),
        **dict.fromkeys(map(chr, (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F)), "\u2009"),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)}, "＄": "$", "％": "%", "，": ",",
        "．": ".", "’": "'", "⋅": "·", "∙": "·", "✕": "×", "\u2062": "×", **dict.fromkeys("⦃⦄", " "),
        **dict.fromkeys("\u200b\u2060\ufeff\u00ad"),
    }
)  # fmt: skip
_VULGAR = {
    "½": "1⁄2", "⅓": "1⁄3", "⅔": "2⁄3", "¼": "1⁄4", "¾": "3⁄4", "⅕": "1⁄5", "⅖": "2⁄5",
    "⅗": "3⁄5", "⅘": "4⁄5", "⅙": "1⁄6", "⅚": "5⁄6", "⅐": "1⁄7", "⅛": "1⁄8", "⅜": "3⁄8", "⅝": "5⁄8",
    "⅞": "7⁄8", "⅑": "1⁄9", "⅒": "1⁄10",
}  # fmt: skip
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_COMMANDS = {
    "$": "$", "%": "%", ",": "\u2009", ";": "\u2009", ":": "\u2009", ">": "\u2009", " ": "\u2009", "!": "",
    "left": "", "right": "", "displaystyle": "", "textstyle": "", "quad": " ",
    "qquad": " ", "thinspace": "\u2009", "times": "×", "cdot": "·", "div": "÷", "pm": "±", "approx": "≈",
    "degree": "°", "pounds": "£", "euro": "€", "leq": "≤", "le": "≤", "geq": "≥", "ge": "≥",
    "rightarrow": "=", "Rightarrow": "=", "implies": "=",
}  # fmt: skip
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)(?![A-Za-z])|([^A-Za-z]))")
_GROUPING = re.compile(r"\{,\}|\\text\{,\}|,\\!|(?<=[0-9])~(?=[0-9])")
_ANGLE = re.compile(r"\^\s?(?:°|\{\s?°\s?\}|\\circ|\{\s?\\circ\s?\})")
_UNIT_POWER = re.compile(
    r"(?<![A-Za-z])((?:[cdkm]?m|in|ft|yd|mi|s|units?|inch(?:es)?|feet|foot|yards?|miles?|(?:kilo|centi|milli)?met(?:er|re)s?)"
    r"\s?\}?)\s?\^\s?(?:\{\s?-?[1-4]\s?\}|-?[1-4](?![0-9]))"
)
# Only single characters have possessive quantifiers: Python before 3.11.5 matches possessive groups wrongly.
_DIGITS = (
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])|[1-9][0-9]{0,2}(?:[ \u2009][0-9]{3})+(?![ \u2009]?[0-9])"
    r"|[1-9][0-9]{0,2}(?:'[0-9]{3})+(?!['0-9])|[1-9][0-9]{0,2}(?:_[0-9]{3})+(?![_0-9])"
    r"|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9,])|[0-9]{1,100}+)"
)
_UNSIGNED = rf"(?:{_DIGITS}(?:\.[0-9]{{1,100}}+)?|\.[0-9]{{1,100}}+)"
_TERM = rf"\s{{0,2}}([-+]?{_UNSIGNED})\s{{0,2}}"
_FRACTION = re.compile(
    rf"\\[dtc]?frac\s{{0,2}}(?:\{{{_TERM}\}}|([0-9]))\s{{0,2}}(?:\{{{_TERM}\}}|([0-9]))"
    rf"|\{{{_TERM}\\over\s{_TERM}\}}"
)
_WORDS = re.compile(
    r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|bf|operatorname)\s?\{([^{}]*)\}"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15,
}  # fmt: skip
CURRENCY = (
    r"(?:(?<![A-Za-z])(?:US|CA|AU|HK|NZ|[CAS])?\$|[€£¥₹]|(?<![A-Za-z])(?:Rs\.?|USD|EUR|GBP|INR))[ \u2009]?"
)


def _exponent(name: str) -> str:
    return rf"(?:\{{\s?(?P<{name}>[-+]?[0-9]{{1,4}})\s?\}}|(?P<{name}_>[-+]?[0-9]{{1,4}}))"


NUMBER = re.compile(
    rf"""
    (?<![\w])(?<![0-9][.,/:'-])(?<![0-9.][eE][-+])(?<!\.\.)
    (?P<sign>(?:(?<![-+\w)\]}}⦄%])[-+](?:[ \u2009]?(?=[$€£¥₹]))?|(?i:\b(?:negative|minus)[ \u2009]+)))?
    (?:{CURRENCY})?(?P<inner>(?<=[$€£¥₹])[-+])?
    (?:
        (?:(?P<whole>[0-9]{{1,100}}+)[ \u2009]?)?⦃(?P<top>[^⁄⦃⦄]{{1,210}})⁄(?P<bottom>[^⁄⦃⦄]{{1,210}})⦄
      | (?P<mixed>[0-9]{{1,100}}+)(?:[ \u2009]+|[ ]and[ ])(?P<part>[0-9]{{1,100}}+)/(?P<of>[0-9]{{1,100}}+)
      | (?P<value>{_UNSIGNED})
        (?:
            [eE](?P<e>[-+]?[0-9]{{1,4}})
          | \s?[×·*x]\s?10\s?(?:\^|\*\*)\s?{_exponent("ten")}
          | \s?(?:\^|\*\*)\s?{_exponent("power")}
          | \s?/\s?(?P<divisor>[-+]?{_UNSIGNED})
        )?
    )
    (?P<scale>(?:[ \u2009-]{{0,2}}(?i:{"|".join(_SCALES)})s?\b){{0,2}})
    (?!(?:[.,/:'_^⦃-]|\s?/\s?|\*\*)?[0-9⦃]|[eE][-+]?[0-9]|\^|\s?[×·]\s?10\s?\^)
    """,
    re.VERBOSE,
)
"""A number as a whole: grouped digits, decimals, fractions, mixed numbers, powers, words such as million."""

_PREPOSITION = (
    r"(?:of|in|per|out|for|from|at|by|on|with|than|over|within|after|before|because|since|as|each|every|if|when"
    r"|where|which|that|is|are|was|so|but)\b"
)
_NEXT = r"(?:(?i:negative|minus)\s|[-+$€£\s(*]{0,6}\\?\$?[0-9⦃.])"
# The text after a number that makes it a part of something else.
_PART = re.compile(
    r"""
    \s*(?:[+×÷·]|/(?!\s?[A-Za-z]))\s*[\w($⦃\\]|\s?\*{1,2}\s*[0-9(]|\s*-\s*[0-9(⦃]|\s*[√π∞^±]|!(?=[^\s])
  | \.\.+[0-9] | \+ | [xX][0-9A-Fa-f] | °\s*[0-9⦃] | \s?(?:d|h|hrs?|min|m(?![23]\b)|ft|lbs?|kg)[0-9]
  | \s?\((?=[A-Za-z]\)|[A-Za-z]\s?[-+*/^])|[A-Za-z](?<![mgshlLVWNJACFEe])(?![A-Za-z])|[ \u2009]*\\[A-Za-z]
  | (?:\s*,)?\s*(?:and|or)\s+(?:an?|one)\s+(?:half|third|quarter)
  | \s*(?:halves|half|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?\b(?![ -]grade)
    |(?:hundred|thousand|million)ths?)\b
  | \s*(?:(?:[bmt]n|tens|pi|cubed|factorial)\b|to\sthe\s(?:[a-z]+\s)?power|i\b(?!\s[a-z])
    |squared\b(?!\s(?:[ckm]?m\b|met|feet|foot|inch|yard|mile|unit)))
  | \s*(?:more|less|fewer|greater|larger|smaller)\s+than\s+[-$€£]*[0-9⦃]
  | \s*(?:%|percent)\s+of\s+[-$€£]*[0-9⦃] | \s+over\s+[-$€£]*[0-9⦃]
    """,
    re.VERBOSE,
)
_LISTED = re.compile(
    rf"\s*(?:[,;:~±]|,?\s*(?:and|or|to|through|versus|vs)\b)\s*{_NEXT}|[ \u2009]+[0-9⦃]"
    rf"|\s?(?!{_PREPOSITION})[A-Za-z°%]{{1,20}}\.?,?\s(?:and\s|or\s|to\s|-\s?)?{_NEXT}",
)
_OR = re.compile(rf"\s*(?:[,;:±]|or\b)\s*{_NEXT}")
_ELLIPSIS = re.compile(r"\s?(?:\.{2,}|…|\\[lcd]?dots|\\overline)")
# The text before a number that makes it a part of something else.
_REST = re.compile(
    r"(?:[\^_√]|[{|]|±\s*|\\[A-Za-z]+\s*|"
    r"(?:[0-9)\]}⦄%]|[0-9]\s?[A-Za-z]{1,12})[ \u2009]*"
    r"(?:[-+*/×·÷]|\b(?:minus|plus|times|x|over|to the power of)\b)[ \u2009]*"
    r"|[0-9⦄][ \u2009]+|[0-9⦄][ \u2009]*[,;:][ \u2009]*|[0-9⦄]%?\s+(?:and|or|to)\s+\$?"
    r"|(?:^|\s)[<>≤≥]=?\s*|[≤≥]\s*|[A-Za-z]\s+-\s+|[-+]{2}|[0-9]°\s*|(?:%|percent)\sof\s"
    r"|[0-9]\s(?:more|less|fewer|greater|larger|smaller)\sthan\s"
    r"|(?i:\b(?:not|twice|thrice|double|triple|half(?:\sof)?|(?:third|quarter)\sof)\s(?:the\s)?)"
    r"|[0-9]\s?(?:hours?|hrs?|h|minutes?|min|days?|weeks?|months?|years?|feet|foot|ft|pounds?|lbs?"
    r"|dollars?|m)(?:,|\s+and)?\s+)$"
)
_REST_STRICT = re.compile(r"[A-Za-z<>|!]\s*$|[-+*/×·÷(\[]\s*[A-Za-z)\]]?\s*$")
_STRICT = re.compile(r"\s*(?:!|[a-zA-Z](?![A-Za-z°])(?<![mgshlLVWNJACF])|[<>≤≥|(]|[-+*/]\s*\S)")


def plain(text: str) -> str:
    """Returns a text with uniform signs, blanks, fractions and LaTeX's commands."""
    text = _GROUPING.sub(lambda match: "\u2009" if match[0] == "~" else ",", text.translate(_CHARACTERS))
    text = _RAISED.sub(_caret, text)
    for sign, fraction in _VULGAR.items():
        text = text.replace(sign, f"⦃{fraction}⦄")
    text = _UNIT_POWER.sub(r"\1", _ANGLE.sub("°", _COMMAND.sub(_command, text)))
    return _FRACTION.sub(_braced, text)


def unwrapped(text: str) -> str:
    r"""Returns a text with the content of each `\text{…}` in its place."""
    return _WORDS.sub(r" \1 ", text)


def without_words(text: str) -> str:
    r"""Returns a text without the content of each `\text{…}`."""
    return _WORDS.sub(" ", text)


def is_whole(match: re.Match[str], *, strict: bool = False, listed: bool = True) -> bool:
    """Returns whether the text around a number leaves it a number of its own.

    Args:
        match: A match of NUMBER in a text that `plain` returned.
        strict: The text is an expression, so that letters and brackets are variables and functions.
        listed: A number beside it makes a list or a range; else only after a comma or 'or'.
    """
    text, (start, end) = match.string, match.span()
    after, before = text[end : end + 80], text[max(0, start - 40) : start].rpartition("\n")[2]
    if _PART.match(after) or (_LISTED if listed else _OR).match(after) or _REST.search(before):
        return False
    if match["value"] and "." in match["value"] and _ELLIPSIS.match(after):
        return False
    return not (strict and (_STRICT.match(after) or _REST_STRICT.search(before)))


def value_of(match: re.Match[str]) -> Fraction | None:
    """Returns the exact value of a match; None for a division by zero, an improper part of a mixed number and
    powers out of range."""
    sign = -1 if (match["sign"] or "+").strip()[0] in "-nNmM" else 1
    if match["inner"]:
        sign = -sign if match["inner"] == "-" else sign
    integer, divisor = Fraction(match["whole"] or match["mixed"] or 0), Fraction(1)
    if match["top"]:
        number, divisor = _decimal(match["top"]), _decimal(match["bottom"])
    elif match["mixed"]:
        number, divisor = Fraction(match["part"]), Fraction(match["of"])
    else:
        number = _decimal(match["value"])
        if match["divisor"]:
            divisor = _decimal(match["divisor"])
    if divisor == 0 or ((match["whole"] or match["mixed"]) and not 0 < number / divisor < 1):
        return None
    shift, power = match["e"] or match["ten"] or match["ten_"], match["power"] or match["power_"]
    exponent = int(shift or power or 0)
    if abs(exponent) > MAX_EXPONENT or (power and number == 0):
        return None
    number = number / divisor
    if power:
        number = number**exponent
    elif shift:
        number *= Fraction(10) ** exponent
    for word in re.findall("[a-z]+", match["scale"].lower()):
        number *= _SCALES[word.removesuffix("s")]
    return sign * (integer + number)


def _caret(match: re.Match[str]) -> str:
    return "^{" + "".join("0123456789-+"[_SUPERSCRIPTS.index(sign)] for sign in match[0]) + "}"


def _command(match: re.Match[str]) -> str:
    return _COMMANDS.get(match[1] or match[2], match[0])


def _braced(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2] or match[5], match[3] or match[4] or match[6]
    return f"⦃{top}⁄{bottom}⦄"


def _decimal(digits: str) -> Fraction:
    return Fraction(re.sub(r"[,'_ \u2009]", "", digits))
