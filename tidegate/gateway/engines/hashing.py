"""Consistent hashing with bounded loads: where a key belongs, so that membership moves only what it must.

Each member's claim on a key is a hash of the two (rendezvous hashing; Thaler and Ravishankar, 1998): one
that joins takes only the keys that it now wins, one that leaves gives up only its own. A member that
holds more than its share is passed over (consistent hashing with bounded loads; Mirrokni, Thorup and
Zadimoghaddam, 2018).
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

SLACK = 0.25
"""How far above the mean a member may be loaded before keys go to the next one."""


def score(key: str, member: str) -> bytes:
    return blake2b(f"{member}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()


def rank(key: str, members: Mapping[str, float]) -> list[str]:
    """The members in the order in which they claim a key."""
    return sorted(members, key=lambda member: score(key, member), reverse=True)


def place(key: str, loads: Mapping[str, float]) -> str:
    """The first of the members that claim a key and have room for one more; `loads`: what each holds.

    Room is the mean rounded up, or SLACK above the mean where that is more: so there always is some.
    Raises ValueError where there is no member.
    """
    if not loads:
        raise ValueError("there is no member to place a key on")
    total = sum(loads.values()) + 1
    most = max(-(-total // len(loads)), int(total * (1 + SLACK) / len(loads)))
    return next(one for one in rank(key, loads) if loads[one] + 1 <= most)
