"""Encoders, which convert queries and passages to vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError
from tidegate.rag.encoders.hashing import HashEncoder
from tidegate.rag.encoders.prefixes import EncoderPrefixes, known_prefixes

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Metric = Literal["cosine", "dot"]
Dtype = Literal["float32", "bfloat16", "float16"]
_BATCH = 64


class Encoder(Protocol):
    """Interface of encoders. With the metric `cosine`, vectors have length 1 (or 0)."""

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def prefixes(self) -> EncoderPrefixes: ...

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
                list(texts), prompt=prefix, batch_size=_BATCH, show_progress_bar=False,
                normalize_embeddings=False, convert_to_numpy=False, convert_to_tensor=True,
            )  # fmt: skip
        # Normalised after the conversion, because in bfloat16 a length of 1 has only two exact digits.
        array: npt.NDArray[np.float32] = vectors.float().cpu().numpy()
        return array if self.metric == "dot" else _unit(array)


def _metric(model: SentenceTransformer, name: str) -> Metric:
    similarity = model.similarity_fn_name or "cosine"
    if similarity not in ("cosine", "dot"):
        raise ConfigError(f"the encoder {name!r} compares by {similarity}; only cosine and dot are supported")
    return "dot" if similarity == "dot" else "cosine"


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = np.divide(
        vectors, lengths, out=np.zeros_like(vectors), where=lengths != 0
    )
    return unit


def _own_prefixes(model: SentenceTransformer) -> EncoderPrefixes | None:
    """Returns the model's own prompts, or None if it has none."""
    prompts = model.prompts or {}
    query = prompts.get("query") or ""
    passage = prompts.get("document") or prompts.get("passage") or prompts.get("corpus") or ""
    return EncoderPrefixes(query, passage) if query or passage else None


def _load(name: str, device: str, dtype: Dtype) -> SentenceTransformer:
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ConfigError(
            f"the encoder {name!r} needs sentence-transformers: pip install 'tidegate[rag]'"
        ) from None
    try:
        # Without a dtype the model would have that of its file, and half precision is slow on CPUs.
        model = SentenceTransformer(name, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the encoder {name!r} cannot be loaded: {error}; give a model directory, an id on the hub, or"
            " 'hash'"
        ) from None
    return model.eval()
