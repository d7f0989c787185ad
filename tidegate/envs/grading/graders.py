"""The built-in reward functions, by the names that settings give them.

Those that look for an answer tell which extractor found it (`extractor/<name>`, 1 or 0, so that a mean is
a share), and whether none did: `unparseable` is counted apart from wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from tidegate.envs.grading import verl
from tidegate.envs.grading.answers import EXTRACTORS, number, read_answer
from tidegate.envs.grading.math_verify import verify
from tidegate.envs.rewards import Grade, exact_answer
from tidegate.errors import RewardError


def exact_match(output: str | None, answer: Any) -> float:
    """1 where the output is the answer, blanks at both ends aside; a list of answers has any of them."""
    said = (output or "").strip()
    return float(any(said == one.strip() for one in _answers(answer)))


def contains(output: str | None, answer: Any) -> float:
    """1 where the answer (any, of a list) occurs in the output, upper and lower case alike."""
    said = (output or "").casefold()
    return float(any(one.strip().casefold() in said for one in _answers(answer)))


def numeric(output: str | None, answer: Any) -> Grade:
    r"""1 where the number that the output gives equals the answer (any, of a list), exactly.

    It is read from the last `####`, else the last `\boxed{}`, else after 'answer is' or 'A:', else it is
    the last number.
    """
    found = read_answer(output)
    told = _extractor(EXTRACTORS, None if found is None else found.extractor)
    golds = [_gold(one) for one in _each(answer)]
    return Grade(float(found is not None and found.value in golds), told)


def verl_strict(output: str | None, answer: Any) -> Grade:
    """verl's `strict`: the first `#### number`, compared as text."""
    return _verl("verl_strict", verl.strict(output or ""), answer)


def verl_flexible(output: str | None, answer: Any) -> Grade:
    """verl's `flexible`: the last number, compared as text."""
    return _verl("verl_flexible", verl.flexible(output or ""), answer)


def math_verify(output: str | None, answer: Any) -> Grade:
    """1 where math-verify finds the output equivalent to the answer (any, of a list); needs the extra
    `math`."""
    verdicts = [verify(output or "", one) for one in _answers(answer)]
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


def _verl(name: str, said: str | None, answer: Any) -> Grade:
    return Grade(float(said in _answers(answer)), _extractor([name], said and name))


def _extractor(names: Iterable[str], fired: str | None) -> dict[str, float]:
    shares = {f"extractor/{name}": float(name == fired) for name in names}
    return {**shares, "unparseable": float(fired is None)}


def _each(answer: Any) -> Sequence[Any]:
    return answer if isinstance(answer, list | tuple) else [answer]


def _answers(answer: Any) -> list[str]:
    return [str(one) for one in _each(answer)]


def _gold(answer: Any) -> Fraction:
    text = str(answer)
    if type(answer) in (int, float):
        return Fraction(text)  # 1e-05, which is no number in what a model writes
    value = number(text)
    if value is None:
        found = read_answer(text)
        if found is None:
            raise RewardError(f"the answer {text[:80]!r} contains no number")
        value = found.value
    return value
