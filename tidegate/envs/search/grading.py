"""Grading short answers: exact match, containment and F1 as SQuAD has them (Rajpurkar et al. 2016), and which
of the gold documents an episode has seen.

Texts are compared lower-cased, without punctuation, articles and surplus blanks. Of several gold answers the
best counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_OPEN, _CLOSE = "<answer>", "</answer>"
_LINE = re.compile(r"^(?:\[([^\]\n]+)\] )?(.*)$", re.MULTILINE)


def normalize(text: str) -> str:
    """Lower case; no punctuation, articles or surplus blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract(output: str | None, min_matches: int = 1) -> str | None:
    """What stands in the last `<answer>…</answer>`; None where there are fewer than `min_matches` of them.

    A prompt that shows the form holds one of its own: where it is part of the output, the answer is the
    second at least.
    """
    found = list(_answers(output or ""))
    return found[-1].strip() if len(found) >= max(1, min_matches) else None


def _answers(text: str) -> Iterator[str]:
    """What stands between each `<answer>` and the next `</answer>`; in time proportional to the text."""
    at = 0
    while (start := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        yield text[start + len(_OPEN) : end]
        at = end + len(_CLOSE)


def exact_match(said: str, golds: Sequence[str]) -> float:
    """1 where the answer is one of the gold answers."""
    return float(any(normalize(said) == normalize(gold) for gold in golds))


def sub_exact_match(said: str, golds: Sequence[str]) -> float:
    """1 where one of the gold answers occurs in the answer."""
    whole = normalize(said)
    return float(any(bare in whole for gold in golds if (bare := normalize(gold))))


def f1(said: str, golds: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, for the gold answer that it is highest for."""
    return max((_f1(normalize(said).split(), normalize(gold).split()) for gold in golds), default=0.0)


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = (Counter(said) & Counter(gold)).total()
    return 2 * common / (len(said) + len(gold))


METRICS = {"em": exact_match, "sub_em": sub_exact_match, "f1": f1}


def well_formed(output: str | None) -> float:
    """1 where the output has exactly one `<answer>`, closed, and nothing after it."""
    text = (output or "").strip()
    return float(text.count(_OPEN) == text.count(_CLOSE) == 1 and text.endswith(_CLOSE))


def recall(messages: Sequence[Mapping[str, Any]], gold: Mapping[str, str]) -> float:
    """The share of the gold documents (id or title → text, "" where that isn't known) that tools returned.

    A document was returned where a result has a line with its id in brackets first (`[id] …`), a line that
    is its title, or its text.
    """
    whole = "\n".join(str(one.get("content") or "") for one in messages if one.get("role") == "tool")
    named: set[str] = set()
    for line in _LINE.finditer(whole):
        named.update(part for part in line.groups() if part)
    return sum(id in named or (bool(text) and text in whole) for id, text in gold.items()) / len(gold)
