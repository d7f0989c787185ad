"""The vocabulary of a model: models that share it map token ids to the same tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import StartError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Size of a model's vocabulary, and hash of its tokenizer's table of tokens."""

    size: int
    tokenizer_hash: str


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's table: its tokens, added ones too, in the order of their ids."""
    table = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer of a model directory. Raises StartError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises many types
        raise StartError(f"{directory}: the tokenizer cannot be loaded: {error}") from error


def model_vocab_size(directory: Path) -> int:
    """Return the number of ids of a model, by its config. Raises StartError."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{directory}/config.json: no vocab_size can be read: {error!r}") from None
