"""Encodes a text in the pieces between its added tokens, and caches the ids of short pieces.

Tokenizers split a text at its added tokens (`<|im_end|>`) before anything else, so that the pieces can be
encoded one by one. Most pieces of a prompt recur: role names, line ends, tool results, system prompts.
"""

from __future__ import annotations

import itertools
import re
from array import array
from functools import lru_cache
from typing import Any

import orjson

LONG = 4096
"""Longer texts, in characters, are encoded as a whole with the interpreter lock released."""
_CACHED = 1024
"""Longer pieces, in characters, are not cached."""
_ENTRIES = 1024
"""Cached pieces. Any client can fill the cache with distinct texts: it then takes at most about 6 MB."""
_BY_PIECE = frozenset(
    {"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
)
"""Pre-tokenizers that treat a piece alike wherever it is. Metaspace does, unless it marks the first only."""
_PROBES = ("", " ", "a", " a ", "\n", "\n\nword", "é 🍎", "1234 567", "\t x", "▁a", " ' s")


class SplitEncoder:
    """Encodes with a fast tokenizer. The ids are those of the whole text; thread-safe."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._tokens: dict[str, int] = {}
        """Ids of the tokens at which texts are split; empty if the tokenizer allows no split."""
        self._split: re.Pattern[str] | None = None
        self._piece = lru_cache(maxsize=_ENTRIES)(self._packed)
        tokens = _splitting_tokens(backend)
        if tokens:
            longest_first = sorted(tokens, key=len, reverse=True)
            self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            self._tokens = {token: backend.token_to_id(token) for token in tokens}
            if not self._probe():
                self._split, self._tokens = None, {}

    @property
    def splits(self) -> bool:
        """Whether texts are split; if not, each is encoded as a whole."""
        return self._split is not None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without further special tokens."""
        if len(text) > LONG:
            # Releases the interpreter lock; the other call is faster.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if self._split is None:
            return list(self._whole(text))
        ids: list[int] = []
        for number, piece in enumerate(self._split.split(text)):
            if number % 2:
                ids.append(self._tokens[piece])
            elif piece:
                ids += self._piece(piece) if len(piece) <= _CACHED else self._whole(piece)
        return ids

    def _packed(self, text: str) -> array[int]:
        """Returns the ids in 4 bytes each; as a tuple of integers they would take ten times as much."""
        return array("i", self._whole(text))

    def _whole(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def _probe(self) -> bool:
        """Whether pieces give the ids of the whole, on texts with whitespace on all sides of a token."""
        token = next(iter(self._tokens))
        texts = [before + token + after for before, after in itertools.product(_PROBES, repeat=2)]
        texts += ["".join(piece + one for piece, one in zip(itertools.cycle(_PROBES), self._tokens))]
        return all(self.encode(text) == list(self._whole(text)) for text in texts)


def _splitting_tokens(backend: Any) -> list[str]:
    """Returns the added tokens at which a text may be split; none if pieces could have other ids."""
    tokens = backend.get_added_tokens_decoder().values()
    alike = (
        backend.truncation is None
        and backend.padding is None
        and not getattr(backend.model, "dropout", None)
        and all(_by_piece(step) for step in steps(_spec(backend.pre_tokenizer)))
        # These match the whitespace around them, or only at the edges of words.
        and not any(token.lstrip or token.rstrip or token.single_word for token in tokens)
    )
    # Normalized tokens are matched in the normalized text, within the pieces.
    return [token.content for token in tokens if alike and not token.normalized and token.content]


def _spec(pre_tokenizer: Any) -> Any:
    """Returns the JSON form of a pre-tokenizer, without that of the vocabulary."""
    if pre_tokenizer is None:
        return None
    try:
        return orjson.loads(pre_tokenizer.__getstate__())
    except Exception:  # noqa: BLE001 - of pre-tokenizers in Python, any
        return {"type": "unknown"}


def _by_piece(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") in ("always", "never")
    return step["type"] in _BY_PIECE


def steps(spec: Any) -> list[Any]:
    """Returns the steps of a tokenizer's normalizer or pre-tokenizer."""
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    inner = spec.get("pretokenizers") or spec.get("normalizers") or []
    return [step for part in inner for step in steps(part)]
