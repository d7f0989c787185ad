"""Text to ids and back, for one tokenizer; and text that only looks like a control token stays text.

A user, a tool or a web page may write `<|im_end|>`. Encoded as it stands it would end the turn. So such
look-alikes are broken before a prompt is encoded: the two halves are encoded apart, decode to the same
text, and are no control token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tidegate.errors import StartError

BREAK = "\ufdd0\ufdd1"  # Unicode's noncharacters: never part of a text that is interchanged
_ESCAPED_BREAK = "\\ufdd0\\ufdd1"
_WINDOW = 16 * 1024
"""Characters that are searched in one step: other threads run between two of them."""
_ALONE = 4096
"""Characters of a text that is encoded while other threads run."""


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a model directory; torch is not imported where `tokenizer.json` is there.

    Raises StartError that says what is missing.
    """
    if not model.is_dir():
        raise StartError(f"{model} is not a directory; give the directory of a Hugging Face model")
    try:
        if (model / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        else:
            from transformers import AutoTokenizer  # imports torch, where it is installed

            tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{model}: its tokenizer cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise StartError(f"{model}: its tokenizer has no chat template; the gateway renders with it")
    return tokenizer


class Codec:
    """One tokenizer. `shown` are special tokens that clients read as text."""

    def __init__(self, tokenizer: Any, shown: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        self.vocabulary = len(tokenizer)
        """How many ids there are."""
        special = {str(one.content) for one in tokenizer.added_tokens_decoder.values() if one.special}
        visible = {self.added[one] for one in shown if one in self.added}
        hidden = {self.added[one] for one in special if one in self.added} | set(tokenizer.all_special_ids)
        self._hidden = frozenset(hidden - visible)
        self._control = _pattern(special)
        self._longest_control = max(map(len, special), default=0)
        self.shields = self._control is not None and self._breaks_well(special)
        """Whether look-alikes can be told from control tokens; where not, they become control tokens."""
        if not self.shields:
            self._control = None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, control tokens included; those that `shield` broke are plain text."""
        if BREAK in text:
            return [one for piece in text.split(BREAK) for one in self._encode(piece)]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            ids: list[int]
            if len(text) > _ALONE:  # this call lets other threads run, and the one below is faster
                [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
                ids = encoding.ids
            else:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text as the client reads it: without special tokens, but with those that are shown."""
        return self.spell([one for one in ids if one not in self._hidden])

    def spell(self, ids: Sequence[int]) -> str:
        """The whole text of `ids`, special tokens included."""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=False)
            return text
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def shield(self, text: str) -> str:
        """`text` with what looks like a control token broken; the text itself mostly."""
        if not self.looks_alike(text):
            return text
        text = text.replace(BREAK, "")
        while (
            found := self._control_at(text, 0)
        ) is not None:  # again: a broken one may have overlapped another
            parts, at = [], 0
            while found is not None:
                parts += [text[at : found.start() + 1], BREAK]
                at = found.start() + 1
                found = self._control_at(text, found.end())
            text = "".join((*parts, text[at:]))
        return text

    def looks_alike(self, text: str) -> bool:
        """Whether there is anything to shield in `text`."""
        return self._control_at(text, 0) is not None

    def _control_at(self, text: str, at: int) -> re.Match[str] | None:
        """The first control token from `at` on."""
        if self._control is None:
            return None
        for start in range(at, len(text), _WINDOW):
            found = self._control.search(text, start, start + _WINDOW + self._longest_control)
            if found is not None and found.start() < start + _WINDOW:
                return found
        return None

    def shield_all(self, value: Any) -> Any:
        """A JSON value with every string in it shielded."""
        if isinstance(value, str):
            return self.shield(value)
        if isinstance(value, list):
            return [self.shield_all(one) for one in value]
        if isinstance(value, dict):
            return {key: self.shield_all(one) for key, one in value.items()}
        return value

    def _breaks_well(self, special: Collection[str]) -> bool:
        """Tokenizers that put a space before whatever they encode cannot encode halves."""
        token = max(special, key=len)
        ids = self.encode(self.shield(f"a {token} b"))
        return self.spell(ids) == f"a {token} b" and self.added.get(token) not in ids


def unescaped(text: str) -> str:
    """Rendered text whose breaks a template may have written as JSON escapes."""
    return text.replace(_ESCAPED_BREAK, BREAK) if _ESCAPED_BREAK in text else text


def _pattern(special: Collection[str]) -> re.Pattern[str] | None:
    breakable = sorted((one for one in special if len(one) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, breakable))) if breakable else None
