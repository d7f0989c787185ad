"""Encoders: texts to vectors, queries and passages each in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError
from tidegate.rag.hashing import HashEncoder

Metric = Literal["cosine", "dot"]


class Encoder(Protocol):
    """What an index is built and asked with. With `cosine`, vectors have length 1 (or 0)."""

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def query_prefix(self) -> str: ...

    @property
    def passage_prefix(self) -> str: ...

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""


def load_encoder(name: str, *, threads: int) -> Encoder:
    """`hash`, or a sentence-transformers model by its directory or its id on the hub.

    Raises ConfigError where there is no such encoder.
    """
    if name == HashEncoder.name:
        return HashEncoder()
    raise ConfigError(f"there is no encoder {name!r}; 'hash' needs no model")
