"""Decodes token ids with the run's tokenizer, which is loaded at the first request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.viewer.formatting import printable
from tidegate.viewer.ledger import newest_checkpoint

LONGEST_CHARACTER = 4
"""Maximum tokens per character: UTF-8 uses at most four bytes."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Texts parallel to the ids. `parts` are the indices of tokens with an incomplete character, whose text
    is that of the completing token; `special` those of special tokens."""

    texts: list[str]
    parts: list[int]
    special: list[int]


class Texts:
    """Decodes the ids of one run. `problem` is the reason if there is no tokenizer; ids are then shown."""

    def __init__(self, run_dir: Path, model: str | None) -> None:
        self._run_dir = run_dir
        self._model = model
        self._lock = threading.Lock()
        self._decode: Decode | None = None
        self._special: frozenset[int] = frozenset()
        self._tried: tuple[Path, ...] | None = None
        self.problem: str | None = None

    def pieces(self, ids: Sequence[int], before: Sequence[int] = ()) -> Pieces | None:
        """Returns the text of each id after the ids `before`; None without a tokenizer."""
        decode = self._decoder()
        if decode is None:
            return None
        context = list(before)[-LONGEST_CHARACTER:]
        texts, parts = in_pieces(decode, [*context, *ids], len(context))
        special = [index for index, token in enumerate(ids) if token in self._special]
        return Pieces([printable(text) for text in texts], parts, special)

    def _decoder(self) -> Decode | None:
        with self._lock:
            places = tuple(self._places())
            # Try again when a checkpoint has been written.
            if self._decode is None and places != self._tried:
                self._tried = places
                self._load(places)
            return self._decode

    def _places(self) -> list[Path]:
        """Returns possible directories of the tokenizer: the newest checkpoint, then the model's."""
        newest = newest_checkpoint(self._run_dir)
        places = [newest] if newest is not None else []
        if self._model:
            path = Path(self._model)
            bases = [Path(), *self._run_dir.resolve().parents[:2]]
            places += [path] if path.is_absolute() else [base / path for base in bases]
        return list(dict.fromkeys(places))

    def _load(self, places: Sequence[Path]) -> None:
        why = "the settings name no model"
        for place in places:
            if not any((place / name).is_file() for name in FILES):
                why = f"{place} {'has none' if place.is_dir() else 'does not exist'}"
                continue
            try:
                self._decode, self._special = load(place)
                self.problem = None
                return
            except Exception as error:  # noqa: BLE001 - shown on the page, whatever the library raises
                why = f"{place}: {error}"
        self.problem = printable(f"Tokens are shown as ids because there is no tokenizer: {why}")[:500]


def load(directory: Path) -> tuple[Decode, frozenset[int]]:
    """Returns a function from ids to text, including special tokens, and the ids of special tokens."""
    fast = directory / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(fast))
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return (lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))), special
    from transformers import AutoTokenizer

    slow: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return (lambda ids: str(slow.decode(ids, **options))), frozenset(slow.all_special_ids)


def in_pieces(decode: Decode, ids: Sequence[int], skip: int) -> tuple[list[str], list[int]]:
    """Returns the text that each id adds to its predecessors, from index `skip` on, and the partial tokens.

    Ids are decoded together with their predecessors, because some tokenizers drop a leading space at the
    start of a text, and because the bytes of a character may be spread over several tokens.
    """
    texts: list[str] = []
    parts: list[int] = []
    start = read = 0  # text up to `read` has been returned; decoding begins at `start`
    for place in range(len(ids)):
        prefix, longer = decode(list(ids[start:read])), decode(list(ids[start : place + 1]))
        waiting = longer.endswith("\ufffd") and place + 1 - read < LONGEST_CHARACTER
        if waiting and place + 1 < len(ids):
            texts.append("")
            parts.append(place)
            continue
        texts.append(longer[len(prefix) :] if longer.startswith(prefix) else longer)
        start, read = read, place + 1
    return texts[skip:], [place - skip for place in parts if place >= skip]
