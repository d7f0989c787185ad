"""Grades short answers by SQuAD's rules (Rajpurkar et al. 2016) and measures retrieval recall.

Texts are compared in lower case, without punctuation, articles and repeated blanks. With several gold answers
the best value counts. As in SQuAD's script, texts of which nothing is left are equal: "the", "A" and "?!".
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DASHES = str.maketrans(dict.fromkeys("−–－﹣", "-"))
_OPEN, _CLOSE = "<answer>", "</answer>"
_LINE = re.compile(r"^(?:\[([^\]\n]+)\] )?(.*)$", re.MULTILINE)


def normalize(text: str) -> str:
    """Returns the text in lower case without punctuation, articles and repeated blanks."""
    text = unicodedata.normalize("NFC", text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalize_exactly(text: str) -> str:
    """Returns the text in lower case without repeated blanks, and without quotes and points around it: signs,
    decimal points and symbols are kept, which `normalize` removes ("-5" and "5", "C#" and "C" are different).
    """
    text = unicodedata.normalize("NFC", text.translate(_DASHES)).lower()
    return " ".join(text.split()).strip("\"'“”‘’").rstrip(".,;!?")


def extract(output: str | None, min_matches: int = 1) -> str | None:
    """Returns the text in the last `<answer>…</answer>`, None if there are fewer than `min_matches`.

    `min_matches` is 2 for outputs that include a prompt which itself contains an `<answer>`.
    """
    answers = list(_answers(output or ""))
    return answers[-1].strip() if len(answers) >= max(1, min_matches) else None


def _answers(text: str) -> Iterator[str]:
    """Yields the text between each `<answer>` and the next `</answer>`, in linear time."""
    at = 0
    while (start := text.find(_OPEN, at)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        yield text[start + len(_OPEN) : end]
        at = end + len(_CLOSE)


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer is one of the gold answers."""
    return float(any(normalize(answer) == normalize(gold) for gold in golds))


def sub_exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if one of the gold answers occurs in the answer."""
    text = normalize(answer)
    return float(any(part in text for gold in golds if (part := normalize(gold))))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The harmonic mean of precision and recall over words, maximised over the gold answers."""
    return max((_f1(normalize(answer).split(), normalize(gold).split()) for gold in golds), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = (Counter(answer) & Counter(gold)).total()
    return 2 * common / (len(answer) + len(gold))


def exact_text(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer is one of the gold answers by `normalize_exactly`."""
    return float(any(normalize_exactly(answer) == normalize_exactly(gold) for gold in golds))


METRICS = {"em": exact_match, "sub_em": sub_exact_match, "f1": f1, "exact": exact_text}


def measures(
    text: str | None,
    golds: Sequence[str],
    messages: Sequence[Mapping[str, Any]],
    documents: Mapping[str, str],
) -> dict[str, float]:
    """Returns the metrics of an episode: METRICS, `unparseable`, and `retrieval_recall` if it is known.

    Args:
        text: The answer; None if the output has none.
        golds: Gold answers.
        messages: The whole conversation.
        documents: Gold documents, see `recall`; empty if they are unknown.
    """
    values = {name: 0.0 if text is None else grade(text, golds) for name, grade in METRICS.items()}
    values["unparseable"] = float(text is None)
    return values | ({"retrieval_recall": recall(messages, documents)} if documents else {})


def well_formed(output: str | None) -> float:
    """1 if the output has exactly one `<answer>`, closed, and nothing after it."""
    text = (output or "").strip()
    return float(text.count(_OPEN) == text.count(_CLOSE) == 1 and text.endswith(_CLOSE))


def recall(messages: Sequence[Mapping[str, Any]], gold: Mapping[str, str]) -> float:
    """Returns the share of the gold documents (id or title → text, "" if unknown) that tools returned.

    A document counts as returned if a result contains a line that begins with its id in brackets (`[id]
    …`), a line that is its title, or its text.
    """
    results = "\n".join(
        str(message.get("content") or "") for message in messages if message.get("role") == "tool"
    )
    named: set[str] = set()
    for line in _LINE.finditer(results):
        named.update(part for part in line.groups() if part)
    return sum(id in named or (bool(text) and text in results) for id, text in gold.items()) / len(gold)
