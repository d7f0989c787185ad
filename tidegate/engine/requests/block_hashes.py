"""Hashes of the blocks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 16
"""Tokens of one block."""


class BlockHashes:
    """The block hashes of a sequence that only grows."""

    __slots__ = ("hashes",)

    def __init__(self) -> None:
        self.hashes: list[int] = []

    def upto(self, tokens: Sequence[int]) -> list[int]:
        """One hash for each whole block of `tokens`, each of everything up to its end."""
        hashes = self.hashes
        for start in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            hashes.append(hash((hashes[-1] if hashes else 0, *tokens[start : start + BLOCK])))
        return hashes[: len(tokens) // BLOCK]
