"""GSM8K's answers as verl reads and compares them, so that figures can be set beside verl's.

The rules are those of verl/utils/reward_score/gsm8k.py (github.com/volcengine/verl): texts are compared,
not numbers, so `18.0` is not `18`. Newer versions of verl look at the last 300 characters only and take the
last `####` there; these are the rules as first published, over the whole text and with the first one.
"""

from __future__ import annotations

import re

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")


def strict(text: str) -> str | None:
    """What follows the first `#### `, without `,` and `$`; None where no such number is there."""
    match = _STRICT.search(text)
    return None if match is None else match[1].replace(",", "").replace("$", "")


def flexible(text: str) -> str | None:
    """The last run of digits, dots and commas, as it stands: commas stay. None where there is none.

    A run that is a single dot is passed over while there is another one before it.
    """
    runs = _FLEXIBLE.findall(text)
    if not runs:
        return None
    return next((run for run in reversed(runs) if run != "."), ".")
