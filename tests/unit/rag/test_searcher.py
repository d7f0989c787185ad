"""Searches of an index that was built from a corpus."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tidegate.errors import ConfigError
from tidegate.progress import Progress
from tidegate.rag.build import Plan, build
from tidegate.rag.index.searcher import Searcher

ROWS = [
    {"id": "paris", "contents": '"Paris"\nParis is the capital of France.'},
    {"id": 7, "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "bato", "title": "Bato", "text": "The mayor of Bato is Riku Lama."},
]


def built(directory: Path, rows: Sequence[object] = ROWS) -> Path:
    source = directory / "corpus.jsonl"
    source.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    build(Plan([source], directory / "index", "hash"), Progress(io.StringIO()))
    return directory / "index"


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    return Searcher(built(tmp_path_factory.mktemp("rag")), threads=1)


def test_each_query_finds_its_document_first(searcher: Searcher) -> None:
    found = searcher.search(["Who is the mayor of Bato?", "capital of Germany"], [1, 2])
    assert [[hit.id for hit in hits] for hits in found] == [["bato"], ["7", "paris"]]
    assert found[1][0].score > found[1][1].score


def test_no_more_than_there_is_and_no_padding(searcher: Searcher) -> None:
    [hits] = searcher.search(["capital of France"], [50])
    assert sorted(hit.id for hit in hits) == ["7", "bato", "paris"]
    assert searcher.search([], []) == []
    assert searcher.search(["capital"], [0]) == [[]]


@pytest.mark.parametrize("query", ["", "  \n", "?!"])
def test_a_query_without_a_word_finds_nothing(searcher: Searcher, query: str) -> None:
    assert searcher.search([query, "Paris"], [3, 1])[0] == []


def test_documents_by_row_and_by_id(searcher: Searcher) -> None:
    assert searcher.find("paris") == searcher.corpus[0]
    assert searcher.corpus[0].title == "Paris"
    assert searcher.corpus[0].text == "Paris is the capital of France."
    assert searcher.find("7") is not None
    assert searcher.find("nobody") is None
    with pytest.raises(IndexError):
        searcher.corpus[3]


def test_a_mode_that_was_not_built_is_refused(searcher: Searcher) -> None:
    with pytest.raises(ConfigError, match="no mode 'bm25'"):
        searcher.search(["x"], [1], "bm25")
