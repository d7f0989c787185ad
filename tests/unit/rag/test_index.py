"""Vector index types: choice, size, recall, and detection of damaged files."""

from __future__ import annotations

import io
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.rag_corpus import build_quietly, passages, write_jsonl
from tidegate.errors import ConfigError, CorpusError
from tidegate.progress import Progress
from tidegate.rag.build import Plan
from tidegate.rag.encoders import HashEncoder
from tidegate.rag.index.index_types import (
    IndexKind,
    choose,
    code_bytes,
    nlist,
    subquantizers,
)
from tidegate.rag.index.manifest import NAME, Manifest
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.index.vector_index import VectorIndex, build_index, files, on_gpus
from tidegate.rag.index.vectors import Vectors

WIKI = (21_015_324, 768)
"""Passages of Wikipedia's 2018 dump, encoded by a model of BERT's size."""


@pytest.mark.parametrize(
    ("count", "dimension", "kind"),
    [
        (200, 2048, "flat"),
        (10_000, 384, "flat"),
        (11_000, 384, "ivf-sq8"),
        (1_000_000, 384, "ivf-sq8"),
        (*WIKI, "ivf-sq8"),
        (10**9, 768, "ivf-pq"),
    ],
)
def test_the_kind_follows_the_size(count: int, dimension: int, kind: IndexKind) -> None:
    choice = choose(count, dimension)
    assert choice.kind == kind
    assert choice.reason


@pytest.mark.parametrize(("dimension", "bytes"), [(768, 96), (384, 48), (1024, 128), (100, 10), (7, 1)])
def test_a_code_of_a_byte_for_about_eight_numbers(dimension: int, bytes: int) -> None:
    assert subquantizers(dimension) == bytes
    assert dimension % bytes == 0


@pytest.mark.parametrize("count", [1, 39, 40, 1000, 100_000, 21_015_324])
def test_every_cell_has_vectors_to_be_trained_with(count: int) -> None:
    assert 1 <= nlist(count) <= max(1, count / 39)


class _Clustered(Vectors):
    """Seeded vectors around 50 centres, as vectors of a corpus are: not written to disk."""

    def __init__(self, directory: Path, count: int = 6000, dimension: int = 32) -> None:
        super().__init__(directory, count, dimension, 1000)
        chance = np.random.default_rng(0)
        centres = chance.standard_normal((50, dimension))
        all = centres[chance.integers(50, size=count)] + 0.6 * chance.standard_normal((count, dimension))
        self.all = (all / np.linalg.norm(all, axis=1, keepdims=True)).astype(np.float32)

    def shards(self):  # type: ignore[no-untyped-def]
        yield from np.split(self.all, range(1000, self.count, 1000))

    def _rows(self, rows):  # type: ignore[no-untyped-def]
        return self.all[rows]


@pytest.mark.parametrize(
    ("kind", "least"),
    [("flat", 1.0), ("sq8", 0.97), ("ivf-flat", 0.97), ("ivf-sq8", 0.95), ("ivf-pq", 0.3)],
)
def test_each_kind_finds_what_it_should_and_takes_what_was_said(
    tmp_path: Path, kind: IndexKind, least: float
) -> None:
    vectors = _Clustered(tmp_path)
    build_index(kind, vectors, tmp_path, 1, Progress(io.StringIO()))
    index = VectorIndex(tmp_path, kind, nlist(6000) // 2 if kind.startswith("ivf") else None, 1)
    queries = vectors.all[::60] + 0.05
    scores, rows = index.search(queries, 10)
    exact = np.argsort(-(queries @ vectors.all.T), axis=1)[:, :10]
    found = [len(set(a) & set(b)) / 10 for a, b in zip(rows.tolist(), exact.tolist(), strict=True)]
    assert np.mean(found) >= least
    assert (np.diff(scores, axis=1) <= 0).all()
    size = sum((tmp_path / name).stat().st_size for name in files(kind))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files(kind))
    assert 0 <= size - 6000 * code_bytes(kind, 32) < 60_000, "centroids, tables and headers"


@pytest.mark.slow
def test_a_batch_is_faster_than_its_queries_one_by_one(tmp_path: Path) -> None:
    """As it is not where FAISS is left as it comes."""
    vectors = _Clustered(tmp_path, 20_000, 384)
    build_index("flat", vectors, tmp_path, 1, Progress(io.StringIO()))
    index = VectorIndex(tmp_path, "flat", None, 1)
    together, alone = [], []
    for _ in range(5):
        start = time.process_time()
        rows = index.search(vectors.all[:64], 10)[1]
        together.append(time.process_time() - start)
        start = time.process_time()
        single = [index.search(vectors.all[row : row + 1], 10)[1][0] for row in range(64)]
        alone.append(time.process_time() - start)
    assert min(alone) / min(together) > 1.5
    assert np.mean(rows == np.stack(single)) > 0.99


def test_cells_without_vectors_leave_no_hit(tmp_path: Path) -> None:
    """FAISS fills what it did not find with row −1: one cell holds fewer than were asked for."""
    source = write_jsonl(tmp_path / "c.jsonl", passages(400))
    build_quietly(Plan([source], tmp_path / "index", "hash", kind="ivf-sq8"))
    searcher = Searcher(tmp_path / "index", threads=1)
    index = searcher._dense.index  # type: ignore[union-attr]
    import faiss

    faiss.extract_index_ivf(index._index).nprobe = 1
    queries = [f"Who is Person{number}?" for number in range(20)]
    rows = index.search(HashEncoder().queries(queries), 400)[1]
    assert (rows == -1).any()
    for hits in searcher.search(queries, [400] * 20):
        assert 0 < len(hits) < 400
        assert len({hit.id for hit in hits}) == len(hits)
        assert all(hit.id in {f"p{row}" for row in range(400)} for hit in hits)


class _TwoGpus:
    """What `faiss-gpu` has and `faiss-cpu` has not, as far as it is asked for."""

    class GpuMultipleClonerOptions:
        shard = useFloat16 = False

    @staticmethod
    def get_num_gpus() -> int:
        return 2

    @staticmethod
    def index_cpu_to_all_gpus(index, co):  # type: ignore[no-untyped-def]
        return (index, co.shard, co.useFloat16)


def test_with_gpus_the_index_is_shared_out_but_sq8(caplog: pytest.LogCaptureFixture) -> None:
    assert on_gpus(_TwoGpus, "index", "flat") == ("index", True, True)  # type: ignore[arg-type]
    assert on_gpus(_TwoGpus, "index", "ivf-pq") == ("index", True, True)  # type: ignore[arg-type]
    assert on_gpus(_TwoGpus, "index", "sq8") is None  # type: ignore[arg-type]
    assert "stays on the CPU" in caplog.text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    source = write_jsonl(directory / "c.jsonl", passages(100))
    build_quietly(Plan([source], directory / "index", "hash", bm25=True))
    return directory / "index"


def copied(whole: Path, tmp_path: Path) -> tuple[Path, Manifest]:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy", Manifest.read(tmp_path / "copy")


def test_damage_to_any_file_is_noticed_by_name(whole: Path, tmp_path: Path) -> None:
    directory, manifest = copied(whole, tmp_path)
    assert len(manifest.files) == 10
    for entry in manifest.files:
        path = directory / manifest.generation / entry.name
        good = path.read_bytes()
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad in (bytes(flipped), good[:-1], None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            with pytest.raises(CorpusError, match=rf"{entry.name} is .*build the index again"):
                Searcher(directory, threads=1)
            path.write_bytes(good)
    assert Searcher(directory, threads=1).search(["Person7"], [1])[0][0].id == "p7"


def test_of_large_files_parts_are_compared(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.rag.index.manifest.FULL_DIGEST_UP_TO", 10)
    directory, manifest = copied(whole, tmp_path)
    manifest.check_files(directory)
    path = directory / manifest.generation / "vectors.faiss"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CorpusError, match=r"vectors\.faiss is damaged"):
        manifest.check_files(directory)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dimension": 512}, "dimension 512"),
        ({"metric": "dot"}, "metric 'dot'"),
        ({"query_prefix": "query: "}, "query prefix 'query: '"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(
    whole: Path, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    directory, manifest = copied(whole, tmp_path)
    assert manifest.encoder is not None
    other = manifest.encoder.model_copy(update=change)
    manifest.model_copy(update={"encoder": other}).write(directory)
    with pytest.raises(CorpusError, match=f"{why}.*use the encoder that built it"):
        Searcher(directory, threads=1)


class _Other(HashEncoder):
    """Of the same name and shape, but other numbers."""

    def queries(self, texts):  # type: ignore[no-untyped-def]
        return np.roll(super().queries(texts), 1, axis=1)


def test_another_model_under_the_same_name_is_refused(whole: Path) -> None:
    with pytest.raises(CorpusError, match="does not encode as hash did"):
        Searcher(whole, threads=1, encoder=_Other())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "format 1"),
        ("not json", "format 1"),
        ('{"format": 2, "generation": "g"}', "format: Input should be 1"),
    ],
)
def test_an_invalid_manifest_is_refused(whole: Path, tmp_path: Path, text: str, why: str) -> None:
    directory, _ = copied(whole, tmp_path)
    (directory / NAME).write_text(text)
    with pytest.raises(CorpusError, match=rf"{why}.*build the index again"):
        Searcher(directory, threads=1)
    (directory / NAME).unlink()
    with pytest.raises(CorpusError, match=r"holds no index.*tidegate rag build"):
        Searcher(directory, threads=1)


def test_an_index_of_words_by_other_rules_is_refused(whole: Path, tmp_path: Path) -> None:
    directory, manifest = copied(whole, tmp_path)
    manifest.model_copy(update={"word_rules": 1}).write(directory)
    with pytest.raises(CorpusError, match=r"version 1 of the rules for words.*build the index again"):
        Searcher(directory, threads=1)
    assert manifest.encoder is not None
    other = manifest.encoder.model_copy(update={"name": "a/model"})
    manifest.model_copy(update={"word_rules": 1, "bm25": False, "encoder": other}).write(directory)
    assert Manifest.read(directory).word_rules == 1, "without words the rules do not matter"


def test_counts_that_differ_are_refused(whole: Path, tmp_path: Path) -> None:
    directory, manifest = copied(whole, tmp_path)
    manifest.model_copy(update={"documents": 99}).write(directory)
    with pytest.raises(CorpusError, match="the manifest has 99 documents, but the files hold 100 documents"):
        Searcher(directory, threads=1)


def test_threads_get_the_answers_that_one_gets(whole: Path) -> None:
    searcher = Searcher(whole, threads=1)
    queries = [f"Who is Person{number} of Town{number // 5}?" for number in range(100)]
    alone = {mode: searcher.search(queries, [5] * 100, mode) for mode in searcher.modes}
    wrong: list[str] = []

    def ask(mode: str) -> None:
        for _ in range(5):
            if searcher.search(queries, [5] * 100, mode) != alone[mode]:
                wrong.append(mode)

    threads = [threading.Thread(target=ask, args=(mode,)) for mode in searcher.modes for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_hybrid_prefers_what_both_find(whole: Path) -> None:
    searcher = Searcher(whole, threads=1)
    assert searcher.modes == ("dense", "bm25", "hybrid")
    for mode in searcher.modes:
        [hits] = searcher.search(["Person42"], [3], mode)
        assert hits[0].id == "p42"
        assert len(hits) == (1 if mode == "bm25" else 3)
    [hits] = searcher.search(["Person42 judge"], [100], "hybrid")
    assert hits[0].score == pytest.approx(2 / 61)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_an_answer_does_not_depend_on_what_is_asked_beside_it(tmp_path: Path) -> None:
    rows = [{"id": f"d{n}", "text": f"{'north ' * (n % 7)}river town {n}"} for n in range(400)]
    build_quietly(Plan([write_jsonl(tmp_path / "c.jsonl", rows)], tmp_path / "i", "hash", bm25=True))
    searcher = Searcher(tmp_path / "i", threads=1)
    for mode in searcher.modes:
        [alone] = searcher.search(["north river"], [60], mode)
        beside, _ = searcher.search(["north river", "town"], [60, 400], mode)
        assert [(hit.id, hit.score) for hit in beside] == [(hit.id, hit.score) for hit in alone], mode


def test_a_query_of_unknown_words_has_no_document_by_bm25(whole: Path) -> None:
    searcher = Searcher(whole, threads=1)
    assert searcher.search(["xylophone", "the", ""], [5, 5, 5], "bm25") == [[], [], []]
    assert len(searcher.search(["", "judge"], [1000, 1000], "bm25")[1]) == 14


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "c.jsonl", passages(3))
    with pytest.raises(ConfigError, match="an encoder, BM25 or both"):
        build_quietly(Plan([source], tmp_path / "index"))
    with pytest.raises(ConfigError, match=r"ivf-pq has .* 9,984 documents, and there are 3"):
        build_quietly(Plan([source], tmp_path / "index", "hash", kind="ivf-pq"))
    wordless = write_jsonl(tmp_path / "w.jsonl", [{"id": "1", "text": "?!"}])
    with pytest.raises(CorpusError, match="no document holds a word"):
        build_quietly(Plan([wordless], tmp_path / "index", bm25=True))
