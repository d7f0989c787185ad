"""Inverted lists: built in blocks, merged into a file, memory-mapped."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.rag_corpus import build_quietly, passages, write_jsonl
from tidegate.errors import CorpusError
from tidegate.progress import Progress
from tidegate.rag.build import Plan
from tidegate.rag.encoders import HashEncoder
from tidegate.rag.index import vector_index
from tidegate.rag.index.index_types import IndexKind, nlist
from tidegate.rag.index.manifest import Manifest
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.index.vector_index import VectorIndex, build_index
from tidegate.rag.index.vectors import Vectors

QUERIES = [f"Where does Person{number} live?" for number in range(0, 300, 7)]


def stored(directory: Path, all: np.ndarray, shard: int) -> Vectors:
    """Vectors as a build stores them."""
    vectors = Vectors(directory, len(all), all.shape[1], shard)
    for number, start in enumerate(range(0, len(all), shard)):
        np.save(directory / f"{number:06d}.npy", all[start : start + shard])
    return vectors


def built(directory: Path, vectors: Vectors, kind: IndexKind) -> Path:
    directory.mkdir()
    build_index(kind, vectors, directory, 1, Progress(io.StringIO()))
    return directory


@examples(max_examples=10)
@given(
    count=st.integers(1, 300),
    dimension=st.integers(1, 24),
    shard=st.integers(20, 150),
    block=st.integers(1000, 20_000),
    k=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_lists_without_quantisation_are_exact(
    count: int, dimension: int, shard: int, block: int, k: int, seed: int
) -> None:
    """`ivf-flat` with nprobe = nlist returns what `flat` returns, whatever the blocks of the build."""
    chance = np.random.default_rng(seed)
    points = chance.standard_normal((count, dimension), np.float32)
    queries = chance.standard_normal((5, dimension), np.float32)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector_index, "BLOCK_BYTES", block)
        patch.setattr("tidegate.rag.files.os.fsync", lambda descriptor: None)  # takes most of the time
        shards = Path(name, "shards")
        shards.mkdir()
        vectors = stored(shards, points, shard)
        flat = VectorIndex(built(Path(name, "flat"), vectors, "flat"), "flat", None, 1)
        directory = built(Path(name, "ivf"), vectors, "ivf-flat")
        inverted = VectorIndex(directory, "ivf-flat", nlist(count), 1)
        assert inverted.count == flat.count == count
        k = min(k, count)
        scores, rows = inverted.search(queries, k)
        exact, _ = flat.search(queries, k)
    np.testing.assert_allclose(scores, exact, atol=1e-4)
    # Rows of equal scores may be in another order.
    products = queries @ points.T
    np.testing.assert_allclose(np.take_along_axis(products, rows, 1), exact, atol=1e-4)
    assert all(len(set(row)) == k for row in rows.tolist())


@pytest.mark.parametrize("kind", ["ivf-flat", "ivf-sq8"])
def test_blocks_do_not_change_the_index(
    tmp_path: Path, kind: IndexKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    all = np.random.default_rng(0).standard_normal((2000, 16), np.float32)
    (tmp_path / "shards").mkdir()
    vectors = stored(tmp_path / "shards", all, 100)
    one = VectorIndex(built(tmp_path / "one", vectors, kind), kind, 4, 1)
    monkeypatch.setattr(vector_index, "BLOCK_BYTES", 300 * 24)
    written: list[str] = []
    write = faiss.write_index
    monkeypatch.setattr(faiss, "write_index", lambda index, path: (written.append(path), write(index, path)))
    many = VectorIndex(built(tmp_path / "many", vectors, kind), kind, 4, 1)
    assert sum("block" in path for path in written) >= 5
    assert not list((tmp_path / "shards").glob("block*"))
    for found, expected in zip(many.search(all[:50], 10), one.search(all[:50], 10), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (tmp_path / "many" / "vectors.lists").read_bytes() == (
        tmp_path / "one" / "vectors.lists"
    ).read_bytes()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lists")
    source = write_jsonl(directory / "c.jsonl", passages(300))
    build_quietly(Plan([source], directory / "index", "hash", kind="ivf-flat"))
    return directory / "index"


def best(directory: Path) -> list[str]:
    return [hits[0].id for hits in Searcher(directory, threads=1).search(QUERIES, [1] * len(QUERIES))]


def test_an_open_index_is_mapped_not_read(index: Path) -> None:
    searcher = Searcher(index, threads=1)
    mapped = Path("/proc/self/maps").read_text()
    generation = index / searcher.manifest.generation
    for name in ("vectors.lists", "documents.jsonl", "documents.offsets", "documents.ids"):
        assert str(generation / name) in mapped
    entry = searcher.manifest.index
    assert entry is not None
    centroids = nlist(300) * HashEncoder.dimension * 4
    assert (generation / "vectors.faiss").stat().st_size < 1.2 * centroids
    assert searcher.search(["Person7"], [1])[0][0].id == "p7"


def test_a_search_starts_no_threads_to_read_lists_ahead(index: Path) -> None:
    inside = index / Manifest.read(index).generation
    opened = VectorIndex(inside, "ivf-flat", 2, 1)._index
    assert faiss.downcast_InvertedLists(opened.invlists).prefetch_nthread == 0


def test_a_moved_index_is_found_and_its_lists_are_its_own(index: Path, tmp_path: Path) -> None:
    expected = best(index)
    shutil.copytree(index, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "second")
    searcher = Searcher(tmp_path / "second", threads=1)
    assert [hits[0].id for hits in searcher.search(QUERIES, [1] * len(QUERIES))] == expected
    lists = tmp_path / "second" / searcher.manifest.generation / "vectors.lists"
    assert str(lists) in Path("/proc/self/maps").read_text()


def test_lists_that_are_missing_or_damaged_are_refused(index: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "copy")
    lists = tmp_path / "copy" / Manifest.read(index).generation / "vectors.lists"
    good = lists.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 3] ^= 4
    for bad, why in ((bytes(flipped), "damaged"), (good[:-8], "bytes long, expected"), (None, "missing")):
        lists.unlink()
        if bad is not None:
            lists.write_bytes(bad)
        with pytest.raises(CorpusError, match=rf"vectors\.lists is .*{why}.*build the index again"):
            Searcher(tmp_path / "copy", threads=1)
    lists.write_bytes(good)
    assert best(tmp_path / "copy") == best(index)
