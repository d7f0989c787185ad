"""Rendezvous hashing with bounded loads.

A key goes to the member with the highest score, a hash of key and member (Thaler and Ravishankar, 1998), so
adding a member moves only the keys it wins, and removing one moves only its own. Members above the load limit
are skipped (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

SLACK = 0.25
"""Fraction above the mean load at which a member takes no more keys."""


def score(key: str, member: str) -> bytes:
    return blake2b(f"{member}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()


def rank(key: str, members: Mapping[str, float]) -> list[str]:
    """The members by descending score for a key."""
    return sorted(members, key=lambda member: score(key, member), reverse=True)


def place(key: str, loads: Mapping[str, float]) -> str:
    """Return the highest-ranked member below the load limit; `loads` gives the current load of each member.

    The limit is the mean rounded up, or SLACK above the mean if that is more, so some member is below it.
    Raises ValueError if there is no member.
    """
    if not loads:
        raise ValueError("cannot place a key: there are no members")
    total = sum(loads.values()) + 1
    limit = max(-(-total // len(loads)), int(total * (1 + SLACK) / len(loads)))
    return next(member for member in rank(key, loads) if loads[member] + 1 <= limit)
