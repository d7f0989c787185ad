"""Hashes of the token blocks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 16
"""Tokens per block."""


class BlockHashes:
    """Block hashes of a sequence that only grows; computed once."""

    __slots__ = ("hashes",)

    def __init__(self) -> None:
        self.hashes: list[int] = []

    def for_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns a hash for each whole block of `tokens`, over all tokens up to the end of the block."""
        hashes = self.hashes
        for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            hashes.append(hash((hashes[-1] if hashes else 0, *tokens[start : start + BLOCK])))
        return hashes[: len(tokens) // BLOCK]
