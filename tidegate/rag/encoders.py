"""Encoders, which convert queries and passages to vectors."""

from __future__ import annotations

import math
import re
import threading
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError
from tidegate.program import advise_extra

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Metric = Literal["cosine", "dot"]
Dtype = Literal["float32", "bfloat16", "float16"]
_CPU_BATCH, _BATCH = 32, 64
"""Texts that a model encodes together, after sorting by length, on the CPU and elsewhere.

MiniLM's shape, one thread, 64 queries of 8 to 16 tokens, CPU time per query: 8.1 ms in one batch, 6.2 ms in
batches of 32 (less padding), 7.1 ms of 16; a query alone 35 ms.
"""


@dataclass(frozen=True, slots=True)
class EncoderPrefixes:
    """Prefixes of queries and of passages, by which an encoder distinguishes them."""

    query: str = ""
    passage: str = ""


class Encoder(Protocol):
    """Interface of encoders. With the metric `cosine`, vectors have length 1 (or 0)."""

    name: str
    dimension: int
    metric: Metric
    prefixes: EncoderPrefixes

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""


def load_encoder(
    name: str,
    *,
    threads: int,
    device: str = "cpu",
    dtype: Dtype = "float32",
    prefixes: EncoderPrefixes | None = None,
) -> Encoder:
    """Loads an encoder: `hash`, or a sentence-transformers model by its directory or its id on the hub.

    `threads` are torch's threads in this process. `prefixes` None: the model's own prompts, or the known
    prefixes of its family. Vectors are float32 whatever the dtype of the model.
    Raises ConfigError if there is no such model, or sentence-transformers is not installed.
    """
    if name == HashEncoder.name:
        return HashEncoder()
    return _Model(_load(name, device, dtype), name, threads, prefixes)


# -- models ------------------------------------------------------------------------------------------


class _Model:
    """A sentence-transformers model. A lock serialises calls, because its tokenizer is not thread-safe."""

    def __init__(
        self, model: SentenceTransformer, name: str, threads: int, prefixes: EncoderPrefixes | None
    ) -> None:
        self.name = name
        self.metric = _metric(model, name)
        self.prefixes = prefixes or _own_prefixes(model) or known_prefixes(name)
        self._model = model
        self._threads = threads
        self._batch = _CPU_BATCH if model.device.type == "cpu" else _BATCH
        self._lock = threading.Lock()
        self.dimension = int(self._encode([""], "").shape[1])

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._encode(texts, self.prefixes.query)

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._encode(texts, self.prefixes.passage)

    def _encode(self, texts: Sequence[str], prefix: str) -> npt.NDArray[np.float32]:
        import torch

        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        with self._lock:
            torch.set_num_threads(self._threads)
            vectors = self._model.encode(
                list(texts), prompt=prefix, batch_size=self._batch, show_progress_bar=False,
                normalize_embeddings=False, convert_to_numpy=False, convert_to_tensor=True,
            )  # fmt: skip
        # Normalised after the conversion, because in bfloat16 a length of 1 has only two exact digits.
        array: npt.NDArray[np.float32] = vectors.float().cpu().numpy()
        if self.metric == "cosine":
            lengths = np.linalg.norm(array, axis=1, keepdims=True)
            array = np.divide(array, lengths, out=np.zeros_like(array), where=lengths != 0)
        return array


def _load(name: str, device: str, dtype: Dtype) -> SentenceTransformer:
    try:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers import PreTrainedModel

        from tidegate.weights.onednn import use_onednn
    except ImportError:
        raise ConfigError(
            f"the encoder {name!r} needs sentence-transformers: {advise_extra('rag')}"
        ) from None
    try:
        # Without a dtype the model would have that of its file, and half precision is slow on CPUs.
        model = SentenceTransformer(name, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the encoder {name!r} cannot be loaded: {error}; give a model directory, an id on the hub, or"
            " 'hash'"
        ) from None
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            use_onednn(module)
    return model.eval()


def _metric(model: SentenceTransformer, name: str) -> Metric:
    similarity = model.similarity_fn_name or "cosine"
    if similarity not in ("cosine", "dot"):
        raise ConfigError(f"the encoder {name!r} compares by {similarity}; only cosine and dot are supported")
    return "dot" if similarity == "dot" else "cosine"


def _own_prefixes(model: SentenceTransformer) -> EncoderPrefixes | None:
    prompts = model.prompts or {}
    query = prompts.get("query") or ""
    passage = prompts.get("document") or prompts.get("passage") or prompts.get("corpus") or ""
    return EncoderPrefixes(query, passage) if query or passage else None


# By the model's name, for models without prompts of their own; from the model cards.
_FAMILIES = (
    (
        r"\be5\b.*\binstruct\b|\be5-mistral\b",
        EncoderPrefixes(
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
        ),
    ),
    (r"\be5\b", EncoderPrefixes("query: ", "passage: ")),
    (
        r"\bbge-(small|base|large)-en\b",
        EncoderPrefixes("Represent this sentence for searching relevant passages: "),
    ),
    (r"\bbge-(small|base|large)-zh\b", EncoderPrefixes("为这个句子生成表示以用于检索相关文章：")),
)


def known_prefixes(name: str) -> EncoderPrefixes:
    """Returns the prefixes of the model family that the model's or directory's name suggests."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    return next((prefixes for pattern, prefixes in _FAMILIES if re.search(pattern, last)), EncoderPrefixes())


# -- words -------------------------------------------------------------------------------------------

WORD_RULES = 2
"""Version of the rules by which `words` splits texts, for indexes that contain words."""
# In scripts without spaces every character is a word; otherwise a sentence would be one long word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Combining marks, which `\w` excludes: vowel signs of Indic scripts, tones, accents that no letter includes.
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x1F000)) if unicodedata.category(mark)[0] == "M")
_WORD = re.compile(rf"[{_UNSPACED}][{_MARKS}]*|(?:[^\W{_UNSPACED}]|[{_MARKS}])+")
# Invisible characters in words: soft hyphen, joiners, variation selectors.
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x200C, 0x200D, 0x2060, 0xFEFF, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]
)
STOP_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be by did do does for from had has have he her his how in is it its of on or she"
        " that the their them they this to was were what when where which who whom whose why will with"
    )
)
_PAIR, _PART = 0.5, 0.2
"""Weights of a pair of adjacent words and of a word's part of three characters; a word has weight 1."""
_STOP_WORD = 0.1


def words(text: str) -> list[str]:
    """Returns the words of a text, the same for upper and lower case and compatible Unicode spellings."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).casefold()
        text = unicodedata.normalize("NFKC", text)  # casefold may take characters apart
    return _WORD.findall(text.lower())


class HashEncoder:
    """Encodes texts without a model: hashes words, pairs of words and parts of words into a unit vector.

    For demos and tests. It finds passages that share words with the query and ignores meaning; the vector of
    a text without words is zero. Features are hashed with a sign (Weinberger et al., 2009), so that
    collisions cancel on average.
    """

    name = "hash"
    metric: Metric = "cosine"
    dimension = 2048
    prefixes = EncoderPrefixes()

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for (feature, weight), count in Counter(_features(text)).items():
                sign = 1.0 if feature & 0x80000000 else -1.0
                row[(feature & 0x7FFFFFFF) % self.dimension] += sign * weight * (1.0 + math.log(count))
            row /= float(np.linalg.norm(row)) or 1.0
        return vectors

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self.queries(texts)


def _features(text: str) -> Iterator[tuple[int, float]]:
    """Yields (hash, weight) of every occurrence of a feature."""
    previous = ""
    for word in words(text):
        yield from _word_features(word)
        if previous:
            yield zlib.crc32(f"{previous} {word}".encode()), _PAIR * _weight(previous) * _weight(word)
        previous = word


@lru_cache(maxsize=65536)
def _word_features(word: str) -> tuple[tuple[int, float], ...]:
    bounded = f"<{word}>"
    parts = [bounded[at : at + 3] for at in range(len(bounded) - 2)] if len(word) > 3 else []
    return (
        (zlib.crc32(word.encode()), _weight(word)),
        *((zlib.crc32(f"#{part}".encode()), _PART * _weight(word)) for part in parts),
    )


def _weight(word: str) -> float:
    return _STOP_WORD if word in STOP_WORDS else 1.0
