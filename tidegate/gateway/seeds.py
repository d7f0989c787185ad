"""Derives the sampling seed of each call."""

from __future__ import annotations

from hashlib import blake2b


def turn_seed(session: int | None, turn: int, agent: int | None) -> int | None:
    """Returns a turn's seed, which is the same in every run of a session with the same seed.

    An agent's constant seed must not make the slots of a group equal, so the session's seed is mixed in.
    """
    if session is None:
        return None if agent is None else agent & 0x7FFFFFFF
    return _seed(f"{session}/{turn}/{agent}")


def continued_seed(seed: int, sampled: int) -> int:
    """Returns the seed with which an interrupted generation resumes after `sampled` tokens."""
    return _seed(f"{seed}+{sampled}")


def _seed(text: str) -> int:
    digest = blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
