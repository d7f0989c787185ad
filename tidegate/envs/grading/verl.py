"""Reads GSM8K's answers by verl's rules, so that results can be compared with verl's.

The rules are those of verl/utils/reward_score/gsm8k.py (github.com/volcengine/verl) as first published: the
first `####` of the whole text, compared as text, so `18.0` is not `18`. Newer versions of verl read the
last `####` of the last 300 characters.
"""

from __future__ import annotations

import re

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def strict(text: str) -> str | None:
    """Returns the number after the first `#### `, without `,` and `$`; None if there is none."""
    match = _STRICT.search(text)
    return None if match is None else match[1].replace(",", "").replace("$", "")


def flexible(text: str) -> str | None:
    """Returns the last run of digits, dots and commas, unchanged; None if there is none.

    A run that is a single dot counts only if there is no other run before it.
    """
    runs = _FLEXIBLE.findall(text)
    if not runs:
        return None
    return next((run for run in reversed(runs) if run != "."), ".")
