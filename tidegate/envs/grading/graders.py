"""Built-in reward functions by their names in settings.

Those that read an answer report which extractor found it (`extractor/<name>`, 1 or 0, so that a mean is a
share), or `unparseable`, so that unparseable and wrong answers are counted separately.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

from tidegate.envs.answers import EXTRACTORS, gold, read_answer
from tidegate.envs.grading.math_verify import verify
from tidegate.envs.rewards import Grade, exact_answer
from tidegate.errors import RewardError
from tidegate.types import finite

# verl's rules as first published (github.com/volcengine/verl, verl/utils/reward_score/gsm8k.py). Newer
# versions read the last `####` of the last 300 characters.
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def exact_match(output: str | None, answer: Any) -> float:
    """1 if the stripped output equals the answer, or any of a list of answers, both in Unicode's NFC."""
    text = _composed(output or "")
    return float(any(text == _composed(gold) for gold in _answers(answer)))


def contains(output: str | None, answer: Any) -> float:
    """1 if the answer, or any of a list, occurs in the output, ignoring case, both in Unicode's NFC."""
    text = _folded(output or "")
    return float(any(_folded(gold) in text for gold in _answers(answer)))


def numeric(output: str | None, answer: Any) -> Grade:
    r"""1 if the number in the output equals the answer, or any of a list, exactly.

    The number is read from the last `####`, else the last `\boxed{}`, else after 'answer is' or 'A:', else it
    is the last number. It is read whole, or the output is unparseable.
    """
    parsed = read_answer(output)
    metrics = _extractor(EXTRACTORS, None if parsed is None else parsed.extractor)
    golds = [_gold(gold) for gold in _listed(answer)]
    return Grade(float(parsed is not None and parsed.value in golds), metrics)


def verl_strict(output: str | None, answer: Any) -> Grade:
    """verl's `strict`: the first `#### number`, compared as text, so `18.0` is not `18`."""
    return _verl("verl_strict", first_hash(output or ""), answer)


def verl_flexible(output: str | None, answer: Any) -> Grade:
    """verl's `flexible`: the last run of digits, dots and commas, compared as text.

    A run that is a single dot counts only if there is no other run before it.
    """
    runs = _FLEXIBLE.findall(output or "")
    last = next((run for run in reversed(runs) if run != "."), ".") if runs else None
    return _verl("verl_flexible", last, answer)


def first_hash(text: str) -> str | None:
    """Returns the number after the first `#### `, without commas; None if there is none."""
    match = _STRICT.search(text)
    return None if match is None else match[1].replace(",", "")


def math_verify(output: str | None, answer: Any) -> Grade:
    """1 if math-verify finds the output equivalent to the answer, or any of a list; needs the extra
    `math`."""
    verdicts = [verify(output or "", gold) for gold in _answers(answer)]
    parsed = any(verdict.parsed for verdict in verdicts)
    equal = any(verdict.equal for verdict in verdicts)
    return Grade(float(equal), _extractor(["math_verify"], "math_verify" if parsed else None))


GRADERS: dict[str, Callable[..., float | Grade]] = {
    "contains": contains,
    "exact_answer": exact_answer,
    "exact_match": exact_match,
    "math_verify": math_verify,
    "numeric": numeric,
    "verl_flexible": verl_flexible,
    "verl_strict": verl_strict,
}


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _folded(text: str) -> str:
    return _composed(_composed(text).casefold())  # folding may decompose


def _verl(name: str, text: str | None, answer: Any) -> Grade:
    return Grade(float(text in _answers(answer)), _extractor([name], text and name))


def _extractor(names: Iterable[str], used: str | None) -> dict[str, float]:
    shares = {f"extractor/{name}": float(name == used) for name in names}
    return {**shares, "unparseable": float(used is None)}


def _listed(answer: Any) -> Sequence[Any]:
    golds = answer if isinstance(answer, list | tuple) else [answer]
    if not golds:
        raise RewardError("the list of right answers is empty; this reward needs one")
    return golds


def _answers(answer: Any) -> list[str]:
    """Returns the texts of the right answers. Raises RewardError if there is none, or an empty one."""
    golds = _listed(answer)
    if any(gold is None or not str(gold).strip() for gold in golds):
        raise RewardError(f"the right answer is {answer!r:.80}; this reward needs one that is not empty")
    return [str(gold) for gold in golds]


def _gold(answer: Any) -> Fraction:
    """Returns the number of a right answer. Raises RewardError if it is not one number."""
    if isinstance(answer, str):
        value = gold(answer)
    elif type(answer) is int:  # of any size
        value = Fraction(answer)
    else:
        value = None
        with suppress(RewardError):
            if not isinstance(answer, bool):
                value = Fraction(str(finite("the answer", answer)))  # also 1e-05, and numpy's numbers
    if value is None:
        raise RewardError(
            f"the answer {str(answer)[:80]!r} is not one number; write it as digits, such as 1234.5"
        )
    return value
