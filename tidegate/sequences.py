"""Splits an episode's tree of turns into the sequences that are trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class TurnSequence(NamedTuple):
    """The turns of one sequence from the root on, and those whose tokens it trains (`own`)."""

    turns: list[int]
    own: set[int]


def training_sequences(parents: Mapping[int, int | None], trainable: Collection[int]) -> list[TurnSequence]:
    """Return the sequences in order; none if no turn is trainable.

    Each path from a root to a last trainable turn is one sequence. A trainable turn that several paths share
    is trained in the first of them and context in the others.

    Args:
        parents: The parent of each turn; None for a root.
        trainable: The turns that may be trained on.
    """
    inner: set[int] = set()
    for turn in trainable:
        parent = parents[turn]
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = parents[parent]
    sequences = []
    done: set[int] = set()
    for leaf in (turn for turn in parents if turn in trainable and turn not in inner):
        path = path_to(leaf, parents)
        own = {turn for turn in path if turn in trainable} - done
        done |= own
        sequences.append(TurnSequence(path, own))
    return sequences


def path_to(turn: int, parents: Mapping[int, int | None]) -> list[int]:
    """Return the turns from the root to a turn."""
    path = [turn]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]
