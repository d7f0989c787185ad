"""Reading of corpora in several formats, and refusal of invalid rows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pytest
from pyarrow import parquet

from tests.rag_corpus import passages, write_jsonl
from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.corpus import corpus as corpus_module
from tidegate.rag.corpus import ingest as ingest_module
from tidegate.rag.corpus.corpus import Corpus, Document
from tidegate.rag.corpus.ingest import ingest
from tidegate.rag.corpus.source import count_rows, source_files


def read(directory: Path, *sources: Path, shard: int = 4) -> Corpus:
    made = directory / "made"
    made.mkdir(exist_ok=True)
    return ingest(source_files(sources), made, shard, 0, lambda done, total: None)


@pytest.mark.parametrize(
    ("row", "document"),
    [
        (
            {"id": "1", "contents": '"A title"\nText\nof two lines'},
            Document("1", "A title", "Text\nof two lines"),
        ),
        ({"id": "1", "contents": '"A "quoted" title"\nText'}, Document("1", 'A "quoted" title', "Text")),
        ({"id": "1", "contents": "No title\nat all"}, Document("1", "", "No title\nat all")),
        ({"id": "1", "contents": '"A title alone"'}, Document("1", "A title alone", "")),
        ({"id": 12, "title": "T", "text": "x", "url": "left out"}, Document("12", "T", "x")),
        ({"_id": "beir", "title": None, "text": "x"}, Document("beir", "", "x")),
        ({"docid": "d", "text": "x"}, Document("d", "", "x")),
        (
            {"id": "ünï/☃", "title": "東京", "text": "🙂 \u2028 \x00"},
            Document("ünï/☃", "東京", "🙂 \u2028 \x00"),
        ),
        ({"id": "e", "title": "Only a title", "text": ""}, Document("e", "Only a title", "")),
    ],
)
def test_rows_become_documents(tmp_path: Path, row: dict[str, Any], document: Document) -> None:
    corpus = read(tmp_path, write_jsonl(tmp_path / "c.jsonl", [row]))
    assert list(corpus) == [document]
    assert corpus.row(document.id) == 0


def test_every_way_of_keeping_a_corpus_gives_the_same_documents(tmp_path: Path) -> None:
    rows = passages(11)
    plain = write_jsonl(tmp_path / "plain.jsonl", rows)
    zipped = tmp_path / "zipped.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    table = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=3)
    parts = tmp_path / "parts"
    parts.mkdir()
    write_jsonl(parts / "a.jsonl", rows[:5])
    parquet.write_table(pyarrow.Table.from_pylist(rows[5:]), parts / "b.parquet")
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n\n  \n").rstrip())
    written = set()
    for number, source in enumerate((plain, zipped, table, parts, spaced)):
        place = tmp_path / str(number)
        place.mkdir()
        corpus = read(place, source)
        assert len(corpus) == 11
        written.add((place / "made" / corpus_module.DATA).read_bytes())
        assert count_rows(source_files([source])) == 11
    assert len(written) == 1


def test_every_document_by_its_id(tmp_path: Path) -> None:
    corpus = read(tmp_path, write_jsonl(tmp_path / "c.jsonl", passages(300)))
    assert [corpus.row(f"p{number}") for number in range(300)] == list(range(300))
    assert corpus.row("p300") is None
    assert corpus.row("") is None
    assert corpus[299].title == "Person299"
    for row in (-1, 300):
        with pytest.raises(IndexError):
            corpus[row]


def test_ids_with_the_same_hash_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (corpus_module, ingest_module):
        monkeypatch.setattr(module, "id_hash", lambda id: len(id))
    corpus = read(tmp_path, write_jsonl(tmp_path / "c.jsonl", passages(30)))
    assert [corpus.row(f"p{number}") for number in range(30)] == list(range(30))
    assert corpus.row("p99") is None
    twice = write_jsonl(tmp_path / "twice.jsonl", [*passages(30), {"id": "p3", "text": "x"}])
    (tmp_path / "twice").mkdir()
    with pytest.raises(CorpusError, match=r"1 id occurs more than once.*\n'p3': .*line 4; .*line 31"):
        read(tmp_path / "twice", twice)


BAD = [
    b'{"id": "a", "text": "good"}',
    b'{"id": "b", "text": ',
    b'{"text": "no id"}',
    b"[1, 2]",
    b'{"id": "c"}',
    b'{"id": "d", "text": 7}',
    b'{"id": "e", "text": " ", "title": ""}',
    b'{"id": true, "text": "x"}',
    b'{"id": "f", "text": "\xff"}',
    b'{"id": "g", "text": "\\ud800"}',
    b'{"id": "h", "text": "good"}',
]


def test_bad_rows_are_listed_with_their_lines_and_nothing_is_built(tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b"\n".join(BAD))
    with pytest.raises(CorpusError) as refused:
        read(tmp_path, source)
    said = str(refused.value).splitlines()
    assert said[0] == "9 rows are invalid:"
    assert [line.partition("line ")[2].partition(":")[0] for line in said[1:]] == [*list("23456789"), "10"]
    assert said[2] == f"{source}, line 3: the row has no 'id' (it has 'text')"
    assert not (tmp_path / "made" / corpus_module.IDS).exists()


def test_after_the_bad_row_is_put_right_all_documents_are_there(tmp_path: Path) -> None:
    rows = [orjson.dumps(row) for row in passages(10)]
    source = tmp_path / "c.jsonl"
    source.write_bytes(b"\n".join([*rows[:6], b"{", *rows[6:]]))
    with pytest.raises(CorpusError, match="line 7: not valid JSON"):
        read(tmp_path, source)
    source.write_bytes(b"\n".join(rows))
    assert [document.id for document in read(tmp_path, source)] == [f"p{number}" for number in range(10)]


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"(?s)40 rows are invalid:.*and 30 more$"):
        read(tmp_path, write_jsonl(tmp_path / "bad.jsonl", [{}] * 40))


def test_ids_that_occur_twice_are_refused_with_both_places(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", passages(5))
    second = write_jsonl(tmp_path / "b.jsonl", [{"id": "other", "text": "x"}, *passages(2)])
    with pytest.raises(CorpusError) as refused:
        read(tmp_path, first, second)
    said = str(refused.value).splitlines()
    assert said[0].startswith("2 ids occur more than once")
    assert said[1:] == [
        f"'p0': {first}, line 1; {second}, line 2",
        f"'p1': {first}, line 2; {second}, line 3",
    ]


@pytest.mark.parametrize("key", ["id", "text", "title"])
def test_a_row_with_a_key_twice_is_refused(tmp_path: Path, key: str) -> None:
    """Of two values, readers keep the last or the first."""
    source = tmp_path / "twice.jsonl"
    row = '{"id": "a", "text": "has \\"text\\" in it", "title": "t"%s}\n'
    source.write_text(row % "" + (row % f', "{key}": "b"').replace('"a"', '"c"'))
    with pytest.raises(CorpusError, match=f"line 2: the key '{key}' occurs twice"):
        read(tmp_path, source)
    source.write_text(row % "")
    [document] = read(tmp_path, source)
    assert document.text == 'has "text" in it'


def test_an_invalid_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(CorpusError, match="the source has no documents"):
        read(tmp_path, tmp_path / "empty.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match=r"broken\.parquet: not a readable parquet file"):
        read(tmp_path, tmp_path / "broken.parquet")
    whole = gzip.compress(write_jsonl(tmp_path / "c.jsonl", passages(500)).read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"id": 1, "text": "x"}')
    for name in ("cut.jsonl.gz", "plain.jsonl.gz"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read to its end"):
            read(tmp_path, tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name} cannot be read to its end"):
            count_rows([tmp_path / name])
    (tmp_path / "nothing").mkdir()
    for path, why in (("absent.jsonl", "no such file"), ("x.csv", "no such file"), ("nothing", "has no")):
        with pytest.raises(ConfigError, match=why):
            source_files([tmp_path / path])


def test_a_large_file_is_judged_by_its_first_megabytes(tmp_path: Path) -> None:
    rows = passages(60_000)
    plain = write_jsonl(tmp_path / "large.jsonl", rows)
    zipped = tmp_path / "large.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes(), 1))
    for path in (plain, zipped):
        assert count_rows([path]) == pytest.approx(60_000, rel=0.1)
