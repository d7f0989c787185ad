"""Questions of data sets: HotpotQA's and NQ's columns, and BrowseComp-Plus, which stays encrypted on disk."""

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
    """A question of a data set. `gold` is its documents: id or title → text, "" where that isn't given."""

    id: str
    question: str
    answers: list[str]
    gold: Mapping[str, str] = field(default_factory=dict)


def read_questions(path: Path, canary: str | None = None) -> list[LabelledQuestion]:
    """All questions of a `.jsonl` or `.parquet` file.

    A row has a `question`; its answers in `golden_answers`, `answers` or `answer`, a text or a list of
    texts; and its gold documents, if known, as `gold_ids`, as HotpotQA's `supporting_facts`, or as
    BrowseComp-Plus's `gold_docs`. With a `canary` the file is BrowseComp-Plus as published, whose texts it
    deciphers in memory. Raises ConfigError that names the row which will not do.
    """
    rows = read_rows(path)
    if canary is not None:
        rows = [DataRow(row.file, row.number, _deciphered(row, canary)) for row in rows]
    return [_asked(row) for row in rows]


def decipher(text: str, canary: str) -> str:
    """BrowseComp's cipher: base64, then each byte XOR those of sha256(canary), over and over.

    Raises ValueError where the text is not what that canary enciphered.
    """
    key = hashlib.sha256(canary.encode()).digest()
    return bytes(
        a ^ b for a, b in zip(base64.b64decode(text, validate=True), cycle(key), strict=False)
    ).decode()


def _deciphered(row: DataRow, canary: str) -> dict[str, Any]:
    """The columns that are read, in the clear; `query_id` was never enciphered."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return decipher(value, canary)
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            # Of documents the ids will do: their texts stay as they are.
            return {key: plain(one) for key, one in value.items() if key == "docid"}
        return value

    try:
        read: dict[str, Any] = {
            key: plain(row[key]) for key in ("query", "answer", "gold_docs") if key in row.values
        }
    except (ValueError, binascii.Error) as error:
        raise row.error(f"its texts are not BrowseComp's, enciphered with this canary: {error}") from None
    return {"query_id": row.values.get("query_id"), **read}


def _asked(row: DataRow) -> LabelledQuestion:
    question = row.text(_first(row, _QUESTION))
    key = _first(row, _ANSWERS)
    value = row[key]
    answers = [str(one) for one in (value if isinstance(value, list) else [value]) if one not in (None, "")]
    if not answers:
        raise row.error(f"{key!r} holds no answer")
    named = next((row.values[one] for one in _ID if row.values.get(one) is not None), row.number)
    return LabelledQuestion(str(named), question, answers, dict(_gold(row)))


def _gold(row: DataRow) -> Iterator[tuple[str, str]]:
    """The gold documents that a row names."""
    facts = row.values.get("supporting_facts")
    if isinstance(facts, Mapping):  # as parquet has them: columns
        facts = facts.get("title")
    titles = [one[0] if isinstance(one, list) and one else one for one in _listed(facts)]
    documents = [one.get("docid") for one in _listed(row.values.get("gold_docs")) if isinstance(one, Mapping)]
    for name in (*_listed(row.values.get("gold_ids")), *titles, *documents):
        if isinstance(name, str | int):
            yield str(name), ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(row: DataRow, keys: tuple[str, ...]) -> str:
    found = next((key for key in keys if key in row.values), None)
    if found is None:
        raise row.error(
            f"there is none of {', '.join(map(repr, keys))}; it has {', '.join(map(repr, row.values))}"
        )
    return found
