"""Detokenizer: finds stop strings and decodes the text of replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidegate.engine.requests.request import Generation
from tidegate.weights.vocabulary import load_tokenizer, tokenizer_hash

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class TokenDecoder:
    """Decodes with the tokenizer of the model directory; without one, replies have no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> TokenDecoder:
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return cls(None)
        return cls(load_tokenizer(directory))

    @property
    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer's table; None without a tokenizer."""
        return None if self.tokenizer is None else tokenizer_hash(self.tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos])

    def matched_stop(self, generation: Generation) -> str | None:
        # A token has at least one byte, so a string of b bytes lies within the last b tokens.
        tail = max(len(stop.encode()) for stop in generation.params.stop) + 1
        text = self._decode(generation, generation.output_ids[-tail:])
        return next((stop for stop in generation.params.stop if stop in text), None)

    def reply(self, generation: Generation) -> str:
        """Returns the text of an ended request, without the token or string that stopped it."""
        ids = generation.output_ids
        matched = (generation.finish_reason or {}).get("matched")
        if isinstance(matched, int):
            ids = ids[:-1]
        text = self._decode(generation, ids)
        if isinstance(matched, str):
            text = text[: text.rfind(matched)] if matched in text else text
        return text

    def _decode(self, generation: Generation, ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        skip = generation.params.skip_special_tokens
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip)
        return text


class IncrementalDecoder:
    """Decodes the text of a growing reply; each call decodes only the newest tokens.

    The offsets are those of vLLM's incremental detokenizer: text is added once it no longer ends with an
    incomplete character.
    """

    def __init__(self, text: TokenDecoder, generation: Generation) -> None:
        self._text = text
        self._generation = generation
        self._so_far = ""
        self._prefix = 0
        self._read = 0

    def decode_first(self, count: int) -> str:
        ids = self._generation.output_ids
        before = self._text._decode(self._generation, ids[self._prefix : self._read])
        after = self._text._decode(self._generation, ids[self._prefix : count])
        if len(after) > len(before) and not after.endswith("�"):
            self._so_far += after[len(before) :]
            self._prefix, self._read = self._read, count
        return self._so_far
