"""Encodes and decodes text, escaping special-token text in messages and tools.

A user, a tool, its definition or a web page may write `<|im_end|>`, which would end the turn if encoded as
is. Such text is therefore split before a prompt is encoded: the two halves are encoded separately, so they
decode to the same text but are not the special token.

Tokenizers split a text at its added tokens before anything else, so that the pieces between them can be
encoded one by one. Most pieces of a prompt recur (role names, line ends, tool results, system prompts), and
the ids of short ones are cached.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from transformers import PreTrainedTokenizerFast

from tidegate.errors import StartError

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


ESCAPE = "\ufdd0\ufdd1"  # Unicode noncharacters, which do not occur in valid text
_JSON_ESCAPE = "\\ufdd0\\ufdd1"
_WINDOW = 16 * 1024
"""Characters searched at once; other threads run in between."""


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a model directory; with `tokenizer.json`, torch is not imported. Raises
    StartError that names the missing or invalid file."""
    if not model.is_dir():
        raise StartError(f"{model} is not a directory; give the directory of a Hugging Face model")
    try:
        if (model / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        else:
            from transformers import AutoTokenizer  # imports torch, where it is installed

            tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{model}: cannot load the tokenizer: {error}") from error
    if not tokenizer.chat_template:
        raise StartError(f"{model}: the tokenizer has no chat template, which the gateway needs")
    return tokenizer


class Codec:
    """Encodes and decodes with a tokenizer. `visible` are special tokens that clients read as text."""

    def __init__(self, tokenizer: Any, visible: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encoder = None if self._backend is None else SplitEncoder(self._backend)
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        self.vocabulary = len(tokenizer)
        """Number of token ids."""
        special = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
        hidden = {self.added[token] for token in special if token in self.added}
        visible_ids = {self.added[token] for token in visible if token in self.added}
        self._hidden = (hidden | set(tokenizer.all_special_ids)) - visible_ids
        self._control = _any_of(special)
        self._sampled_control = _any_of(special.difference(visible))
        self._longest_control = max(map(len, special), default=0)
        self.escapes_special_tokens = self._control is not None and self._encodes_escaped(special)
        """Whether special-token text can be escaped; if not, it becomes special tokens."""
        if not self.escapes_special_tokens:
            self._control = self._sampled_control = None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special tokens included; escaped ones are plain text."""
        if ESCAPE not in text:
            return self._encode(text)
        return [token for piece in text.split(ESCAPE) for token in self._encode(piece)]

    def _encode(self, text: str) -> list[int]:
        if self._encoder is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text that clients read: without special tokens, except the visible ones."""
        return self.decode_all([token for token in ids if token not in self._hidden])

    def decode_all(self, ids: Sequence[int]) -> str:
        if self._backend is None:
            return str(
                self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def escape_special_tokens(self, text: str, *, sampled: bool = False) -> str:
        """Inserts ESCAPE into special-token text; other text is returned unchanged. In a `sampled` text the
        visible tokens stay tokens: models write calls and reasoning with them."""
        control = self._sampled_control if sampled else self._control
        if self._control_at(control, text, 0) is None:
            return text
        text = text.replace(ESCAPE, "")
        # Again after each pass: a broken one may have overlapped another.
        while (found := self._control_at(control, text, 0)) is not None:
            parts, at = [], 0
            while found is not None:
                parts += [text[at : found.start() + 1], ESCAPE]
                at = found.start() + 1
                found = self._control_at(control, text, found.end())
            text = "".join((*parts, text[at:]))
        return text

    def _control_at(self, control: re.Pattern[str] | None, text: str, at: int) -> re.Match[str] | None:
        if control is None:
            return None
        for start in range(at, len(text), _WINDOW):
            found = control.search(text, start, start + _WINDOW + self._longest_control)
            if found is not None and found.start() < start + _WINDOW:
                return found
        return None

    def escape_all(self, value: Any, *, sampled: bool = False) -> Any:
        """Escapes special-token text in all strings of a value, names of fields included."""
        if isinstance(value, str):
            return self.escape_special_tokens(value, sampled=sampled)
        if isinstance(value, list | tuple):
            return type(value)(self.escape_all(item, sampled=sampled) for item in value)
        if isinstance(value, dict):
            return {
                self.escape_all(key, sampled=sampled): self.escape_all(item, sampled=sampled)
                for key, item in value.items()
            }
        return value

    def _encodes_escaped(self, special: Collection[str]) -> bool:
        """Whether escaping works; it fails for tokenizers that prepend a space to each encoded text."""
        token = max(special, key=len)
        ids = self.encode(self.escape_special_tokens(f"a {token} b"))
        return self.decode_all(ids) == f"a {token} b" and self.added.get(token) not in ids


def _any_of(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Returns a pattern of the tokens that can be split in two."""
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def unescape_json(text: str) -> str:
    """Restore ESCAPE in rendered text if the template wrote it as JSON escapes."""
    return text.replace(_JSON_ESCAPE, ESCAPE) if _JSON_ESCAPE in text else text
