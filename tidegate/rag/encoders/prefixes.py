"""Prefixes with which encoders distinguish queries from passages."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderPrefixes:
    """Prefix of each query and of each passage."""

    query: str = ""
    passage: str = ""


_E5 = EncoderPrefixes("query: ", "passage: ")
_E5_INSTRUCT = EncoderPrefixes(
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)
_BGE_EN = EncoderPrefixes("Represent this sentence for searching relevant passages: ")
_BGE_ZH = EncoderPrefixes("为这个句子生成表示以用于检索相关文章：")
# By the model's name, for models without prompts of their own; from the model cards.
_FAMILIES = (
    (r"\be5\b.*\binstruct\b|\be5-mistral\b", _E5_INSTRUCT),
    (r"\be5\b", _E5),
    (r"\bbge-(small|base|large)-en\b", _BGE_EN),
    (r"\bbge-(small|base|large)-zh\b", _BGE_ZH),
)


def known_prefixes(name: str) -> EncoderPrefixes:
    """Returns the prefixes of the model family that the model's or directory's name suggests."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    return next((prefixes for pattern, prefixes in _FAMILIES if re.search(pattern, last)), EncoderPrefixes())
