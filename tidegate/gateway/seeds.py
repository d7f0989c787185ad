"""Seeds of calls: every call samples from a seed of its own."""

from __future__ import annotations

from hashlib import blake2b


def turn_seed(session: int | None, turn: int, agent: int | None) -> int | None:
    """A seed of its own for every turn, the same in every run of a session with the same seed.

    An agent's constant seed must not make the slots of a group alike, so the session's goes into it.
    """
    if session is None:
        return None if agent is None else agent & 0x7FFFFFFF
    return _seed(f"{session}/{turn}/{agent}")


def continued_seed(seed: int, sampled: int) -> int:
    """The seed with which a reply goes on after so many tokens; the same for the same seed and place."""
    return _seed(f"{seed}+{sampled}")


def _seed(text: str) -> int:
    digest = blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
