"""Reads questions of data sets: HotpotQA, NQ, and BrowseComp-Plus, which stays encrypted on disk."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from tidegate.envs.datasets.rows import DataRow, read_rows

_QUESTION = ("question", "query")
_ANSWERS = ("golden_answers", "answers", "answer")
_ID = ("id", "_id", "query_id")


@dataclass(frozen=True, slots=True)
class LabelledQuestion:
    """A question of a data set. `gold` has its documents: id or title → text, "" if unknown."""

    id: str
    question: str
    answers: list[str]
    gold: Mapping[str, str] = field(default_factory=dict)


def read_questions(path: Path, canary: str | None = None) -> list[LabelledQuestion]:
    """Reads all questions of a `.jsonl` or `.parquet` file.

    A row has a `question`; its answers in `golden_answers`, `answers` or `answer`, a text or a list of
    texts; and its gold documents, if known, as `gold_ids`, as HotpotQA's `supporting_facts`, or as
    BrowseComp-Plus's `gold_docs`.

    Args:
        path: The file.
        canary: String with which the file is encrypted (BrowseComp-Plus as published); it is decrypted in
        memory.

    Raises:
        ConfigError: A row is invalid.
    """
    rows = read_rows(path)
    if canary is not None:
        rows = [DataRow(row.file, row.number, _deciphered(row, canary)) for row in rows]
    return [_question(row) for row in rows]


def decipher(text: str, canary: str) -> str:
    """Decrypts BrowseComp's cipher: base64, then XOR with the repeated bytes of sha256(canary).

    Raises ValueError if the text was not encrypted with that canary.
    """
    key = hashlib.sha256(canary.encode()).digest()
    return bytes(
        a ^ b for a, b in zip(base64.b64decode(text, validate=True), cycle(key), strict=False)
    ).decode()


def _deciphered(row: DataRow, canary: str) -> dict[str, Any]:
    """Returns the columns that are used, decrypted; `query_id` is not encrypted."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return decipher(value, canary)
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):  # a document, of which only the id is used
            return {key: plain(item) for key, item in value.items() if key == "docid"}
        return value

    try:
        read: dict[str, Any] = {
            key: plain(row[key]) for key in ("query", "answer", "gold_docs") if key in row.values
        }
    except (ValueError, binascii.Error) as error:
        raise row.error(f"its texts are not BrowseComp's, encrypted with this canary: {error}") from None
    return {"query_id": row.values.get("query_id"), **read}


def _question(row: DataRow) -> LabelledQuestion:
    question = row.text(_first(row, _QUESTION))
    key = _first(row, _ANSWERS)
    value = row[key]
    values = value if isinstance(value, list) else [value]
    answers = [str(answer) for answer in values if answer not in (None, "")]
    if not answers:
        raise row.error(f"{key!r} contains no answer")
    id = next((row.values[key] for key in _ID if row.values.get(key) is not None), row.number)
    return LabelledQuestion(str(id), question, answers, dict(_gold(row)))


def _gold(row: DataRow) -> Iterator[tuple[str, str]]:
    facts = row.values.get("supporting_facts")
    if isinstance(facts, Mapping):  # parquet stores them as columns
        facts = facts.get("title")
    titles = [fact[0] if isinstance(fact, list) and fact else fact for fact in _listed(facts)]
    gold_docs = _listed(row.values.get("gold_docs"))
    documents = [document.get("docid") for document in gold_docs if isinstance(document, Mapping)]
    for name in (*_listed(row.values.get("gold_ids")), *titles, *documents):
        if isinstance(name, str | int):
            yield str(name), ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(row: DataRow, keys: tuple[str, ...]) -> str:
    for key in keys:
        if key in row.values:
            return key
    raise row.error(
        f"there is none of {', '.join(map(repr, keys))}; it has {', '.join(map(repr, row.values))}"
    )
