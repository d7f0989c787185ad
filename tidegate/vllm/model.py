"""What the model's directory says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.errors import StartError


class ModelFiles:
    """`config.json` and `generation_config.json`. Raises StartError where the first is missing or broken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = _read(directory / "config.json")
        self._text: Mapping[str, Any] = self._config.get("text_config") or self._config

    @property
    def vocab_size(self) -> int:
        """Raises StartError where it is not told: an id beyond it can end vLLM."""
        size = self._text.get("vocab_size")
        if type(size) is not int:
            raise StartError(f"{self.directory}/config.json has no vocab_size")
        return size

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        said = self._text.get("tie_word_embeddings", self._config.get("tie_word_embeddings"))
        return said is True

    @property
    def eos_ids(self) -> frozenset[int]:
        path = self.directory / "generation_config.json"
        told = [self._text.get("eos_token_id"), _read(path).get("eos_token_id") if path.is_file() else None]
        return frozenset(
            id_ for one in told for id_ in (one if isinstance(one, list) else [one]) if id_ is not None
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: not a JSON object")
    return value
