"""Reads the configuration files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.errors import StartError


class ModelFiles:
    """`config.json` and `generation_config.json`. Raises StartError if the first is missing or invalid."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = _read(directory / "config.json")
        self._text: Mapping[str, Any] = self._config.get("text_config") or self._config

    @property
    def vocab_size(self) -> int:
        """Raises StartError if it is missing: an id beyond the vocabulary can crash vLLM."""
        size = self._text.get("vocab_size")
        if type(size) is not int:
            raise StartError(f"{self.directory}/config.json has no vocab_size")
        return size

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self._text.get("tie_word_embeddings", self._config.get("tie_word_embeddings")) is True

    @property
    def eos_ids(self) -> frozenset[int]:
        path = self.directory / "generation_config.json"
        values = [self._text.get("eos_token_id"), _read(path).get("eos_token_id") if path.is_file() else None]
        return frozenset(
            id_
            for value in values
            for id_ in (value if isinstance(value, list) else [value])
            if id_ is not None
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: not a JSON object")
    return value
