"""Generated names, in two sets: some are used in held-out tasks only."""

from __future__ import annotations

import hashlib

SYLLABLES = (
    "bal", "ban", "bar", "bel", "ben", "bor", "bru", "cal", "cor", "dal", "dan", "dar", "del",
    "dor", "dro", "dun", "fal", "fan", "fen", "fin", "for", "gal", "gar", "gel", "gor", "gri",
    "hal", "han", "har", "hel", "hol", "jan", "jor", "kal", "kan", "kar", "kel", "kin", "kor",
    "lan", "lar", "len", "lin", "lor", "mal", "mar", "mel", "min", "mor", "nal", "nar", "nel",
    "nor", "pal", "par", "pel", "pin", "por", "ral", "ran", "rel", "rin", "ros", "sal", "san",
    "sel", "sor", "tal", "tan", "tar", "tel", "tor", "val", "var", "vel", "vin", "vor", "wal",
    "wen", "zan",
)  # fmt: skip
"""A name consists of two syllables: `Kelmor`."""
HELD_OUT_SHARE = 3
"""One name in three is used in held-out tasks only."""


def all_names() -> list[str]:
    """Returns all names, those of held-out tasks included."""
    return [a.capitalize() + b for a in SYLLABLES for b in SYLLABLES if a != b]


def held_out_name(name: str) -> bool:
    """Returns whether a name belongs to held-out tasks, for every seed."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
