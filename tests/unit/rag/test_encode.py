"""Encoders: the hashing one, and sentence-transformers models with their prefixes."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rag_corpus import build_quietly, passages, write_jsonl
from tests.tiny_encoder import make_tiny_encoder
from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.build import Plan
from tidegate.rag.encoders import EncoderPrefixes, HashEncoder, known_prefixes, load_encoder, words
from tidegate.rag.index.searcher import Searcher
from tidegate.weights.onednn import OneDNNLinear

TEXTS = ["the mayor of Bato", "a much longer text about the harbour, the bridge and the old market", "x"]


def test_hashing_gives_unit_vectors_and_zeros_for_no_words() -> None:
    vectors = HashEncoder().queries([*TEXTS, "", "?!"])
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, 2048)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 1, 0, 0], atol=1e-6)


def test_hashing_finds_shared_words_and_parts_of_words() -> None:
    encoder = HashEncoder()
    documents = [row["text"] for row in passages(200)]
    vectors = encoder.passages(documents)
    queries = encoder.queries([f"where does Person{number} live?" for number in range(200)])
    assert np.mean(np.argmax(queries @ vectors.T, axis=1) == np.arange(200)) >= 0.98
    libraries, library, harbour = encoder.queries(["libraries", "library", "harbour"])
    assert libraries @ library > 0.1 > abs(libraries @ harbour)


def test_hashing_does_not_depend_on_the_process() -> None:
    """Hashes of Python's own would differ from process to process."""
    wide = HashEncoder()
    wide.dimension = 1 << 20
    assert np.flatnonzero(wide.queries(["to"])).tolist() == [zlib.crc32(b"to") % (1 << 20)]


def test_words_of_scripts_without_spaces_count_by_the_character() -> None:
    assert words("Tide-gate 7 東京タワー ÜBER") == ["tide", "gate", "7", *"東京タワー", "über"]


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("intfloat/e5-base-v2", EncoderPrefixes("query: ", "passage: ")),
        ("/models/multilingual-e5-large/", EncoderPrefixes("query: ", "passage: ")),
        (
            "BAAI/bge-base-en-v1.5",
            EncoderPrefixes("Represent this sentence for searching relevant passages: "),
        ),
        ("sentence-transformers/all-MiniLM-L6-v2", EncoderPrefixes()),
        ("BAAI/bge-m3", EncoderPrefixes()),
        ("me/core5-base", EncoderPrefixes()),
    ],
)
def test_prefixes_by_family(name: str, prefixes: EncoderPrefixes) -> None:
    assert known_prefixes(name) == prefixes


def test_instructed_models_and_chinese_ones() -> None:
    for name in ("intfloat/multilingual-e5-large-instruct", "intfloat/e5-mistral-7b-instruct"):
        assert known_prefixes(name).query.startswith("Instruct: ")
        assert known_prefixes(name).passage == ""
    assert known_prefixes("BAAI/bge-large-zh-v1.5").query.endswith("：")


def test_a_model_s_large_layers_compute_by_onednn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_encoder(tmp_path / "tiny", hidden=256)
    products: list[int] = []
    forward = OneDNNLinear.forward
    monkeypatch.setattr(
        OneDNNLinear, "forward", lambda layer, rows: (products.append(1), forward(layer, rows))[1]
    )
    vectors = []
    for faster in (False, True):
        monkeypatch.setattr("tidegate.weights.onednn.is_faster", lambda faster=faster: faster)
        assert not products
        vectors.append(load_encoder(str(tmp_path / "tiny"), threads=1).passages(TEXTS))
    assert products
    np.testing.assert_allclose(*vectors, atol=1e-5)


@pytest.mark.slow
def test_a_family_s_prefix_stands_before_every_text(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path / "e5-tiny")
    encoder = load_encoder(str(tmp_path / "e5-tiny"), threads=1)
    assert (encoder.dimension, encoder.metric) == (32, "cosine")
    for given, prefix in ((encoder.queries, "query: "), (encoder.passages, "passage: ")):
        found = given(TEXTS)
        expected = model.encode([prefix + text for text in TEXTS], normalize_embeddings=True)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert found.dtype == np.float32
    assert encoder.queries([]).shape == (0, 32)
    own = load_encoder(str(tmp_path / "e5-tiny"), threads=1, prefixes=EncoderPrefixes())
    np.testing.assert_allclose(own.queries(TEXTS), model.encode(TEXTS, normalize_embeddings=True), atol=1e-5)


@pytest.mark.slow
def test_a_model_s_own_prompts_come_first(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path / "e5-own", prompts={"query": "find: ", "document": "in: "})
    encoder = load_encoder(str(tmp_path / "e5-own"), threads=1)
    assert encoder.prefixes == EncoderPrefixes("find: ", "in: ")
    expected = model.encode(["find: x"], prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(encoder.queries(["x"]), expected, atol=1e-5)


@pytest.mark.slow
def test_a_model_kept_in_half_precision_is_computed_in_float32(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path / "half", dtype=torch.bfloat16)
    whole = load_encoder(str(tmp_path / "half"), threads=1)
    half = load_encoder(str(tmp_path / "half"), threads=1, dtype="bfloat16")
    lengths = np.linalg.norm(half.queries(TEXTS), axis=1)
    np.testing.assert_allclose(lengths, 1.0, atol=1e-6)
    assert whole._model.dtype == torch.float32  # type: ignore[attr-defined]
    cosines = np.sum(whole.queries(TEXTS) * half.queries(TEXTS), axis=1)
    assert (cosines > 0.99).all()
    assert not np.array_equal(whole.queries(TEXTS), half.queries(TEXTS))


@pytest.mark.slow
def test_a_model_that_compares_by_dot_product_is_not_normalised(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path / "dot", similarity="dot")
    encoder = load_encoder(str(tmp_path / "dot"), threads=1)
    assert encoder.metric == "dot"
    np.testing.assert_allclose(encoder.queries(TEXTS), model.encode(TEXTS), atol=1e-5)
    make_tiny_encoder(tmp_path / "euclid", similarity="euclidean")
    with pytest.raises(ConfigError, match="compares by euclidean"):
        load_encoder(str(tmp_path / "euclid"), threads=1)


@pytest.mark.slow
def test_threads_that_encode_at_once_get_their_own_vectors(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"), threads=1)
    expected = {count: encoder.queries([TEXTS[1][:count]]) for count in range(4, 40, 4)}
    wrong: list[int] = []

    def encode(count: int) -> None:
        for _ in range(10):
            if not np.allclose(encoder.queries([TEXTS[1][:count]]), expected[count], atol=1e-5):
                wrong.append(count)

    threads = [threading.Thread(target=encode, args=(count,)) for count in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_an_index_knows_the_model_that_built_it(tmp_path: Path) -> None:
    make_tiny_encoder(tmp_path / "e5-tiny")
    source = write_jsonl(tmp_path / "c.jsonl", passages(60))
    manifest, said = build_quietly(Plan([source], tmp_path / "index", str(tmp_path / "e5-tiny")))
    assert "prefixes: 'query: ' for queries, 'passage: ' for passages" in said
    assert manifest.encoder is not None
    assert manifest.encoder.passage_prefix == "passage: "
    searcher = Searcher(tmp_path / "index", threads=1)
    asked = [f"{row['title']}\n{row['text']}" for row in passages(60)]
    assert len(searcher.search(asked, [3] * 60)) == 60
    # Moved, under a name that says nothing of its family: the recorded prefixes hold.
    (tmp_path / "e5-tiny").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Searcher(tmp_path / "index", threads=1)
    moved = Searcher(tmp_path / "index", threads=1, encoder=str(tmp_path / "moved"))
    assert moved.search(asked, [3] * 60) == searcher.search(asked, [3] * 60)
    make_tiny_encoder(tmp_path / "other", seed=1)
    with pytest.raises(CorpusError, match=r"does not encode as .* did when the index was built"):
        Searcher(tmp_path / "index", threads=1, encoder=str(tmp_path / "other"))
    make_tiny_encoder(tmp_path / "wide", hidden=64)
    with pytest.raises(CorpusError, match=r"dimension 32, where .*wide has 64"):
        Searcher(tmp_path / "index", threads=1, encoder=str(tmp_path / "wide"))


@pytest.mark.slow
def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_encoder(str(tmp_path / "absent"), threads=1)
