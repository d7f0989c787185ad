"""Metrics of the sampled tokens of a batch: lengths, episodes cut at a token limit, and repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidegate.types import Trajectory

NGRAM = 4
"""Tokens of an n-gram whose repetitions are counted."""


def length_metrics(trained: Sequence[Trajectory]) -> dict[str, float]:
    """Return statistics of the sampled tokens per episode; quantiles are interpolated linearly."""
    lengths = np.array([episode.sampled_tokens() for episode in trained], dtype=np.float64)
    if not len(lengths):
        return {}
    p50, p95 = np.quantile(lengths, (0.5, 0.95))
    return {
        "tokens/sampled": float(lengths.sum()),
        "length/mean": float(lengths.mean()),
        "length/p50": float(p50),
        "length/p95": float(p95),
        "length/max": float(lengths.max()),
    }


def cut_ratio(episodes: Sequence[Trajectory]) -> float:
    """Return the share of episodes whose last delivered reply ended at its token limit or at the context."""
    return sum(episode.cut() for episode in episodes) / max(1, len(episodes))


def repetition_metrics(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return mean and maximum of `repeated_share` over the episodes that have an n-gram."""
    shares = [share for episode in episodes if (share := repeated_share(episode)) is not None]
    return {"repetition/mean": float(np.mean(shares)), "repetition/max": max(shares)} if shares else {}


def repeated_share(episode: Trajectory) -> float | None:
    """Return the share of an episode's sampled n-grams that occurred earlier in it.

    This is seq-rep-n (Welleck et al., Neural Text Generation with Unlikelihood Training, 2020, eq. 10) with
    n = NGRAM, over all trainable replies of the episode; no n-gram reaches from one reply into the next.

    Returns:
        1 − distinct n-grams ÷ n-grams; None if no reply has NGRAM tokens.
    """
    grams = [gram for turn in episode.trainable_turns() for gram in _ngrams(turn.output_ids.tolist())]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _ngrams(ids: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return zip(*(ids[start:] for start in range(NGRAM)), strict=False)
