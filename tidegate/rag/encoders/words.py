"""Splits text into words, for the hashing encoder and BM25."""

from __future__ import annotations

import re

# In scripts without spaces every character is a word; otherwise a sentence would be one long word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")

COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be by did do does for from had has have he her his how in is it its of on or she"
        " that the their them they this to was were what when where which who whom whose why will with"
    )
)
"""English stop words."""


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
