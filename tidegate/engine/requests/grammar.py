"""Grammar-constrained replies: llguidance computes the ids that are allowed at every token.

llguidance is a small compiled package without dependencies (the extra `grammar`). Without it,
requests with a grammar are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.engine.requests.params import GrammarSource
from tidegate.engine.validation import RequestError
from tidegate.program import advise_extra

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,16}"}
"""Allows indentation; without a bound a reply could be endless white space."""


class Grammar:
    def __init__(self, matcher: Any, eos_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.choices: list[int] = []
        """Number of ids that the grammar allowed, for each output token."""
        self.masses: list[float] = []
        """Total probability of these ids before the grammar excluded the others, for each output token."""
        self.done = False
        """Whether an end token was sampled at a point where the grammar may end."""

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._eos_ids)

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Returns the mask of allowed next ids, [vocab_size]; all False if the grammar has failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        return mask

    def accept(self, token: int, choices: int, mass: float) -> str | None:
        """Advances by a sampled token; returns the error, or None."""
        self.choices.append(choices)
        self.masses.append(mass)
        if not self._matcher.consume_token(token):
            fault = str(self._matcher.get_error()).partition("\n<state>")[0]  # drop the state dump
            return fault or f"it does not allow the token {token}"
        self.done = token in self._eos_ids and self._matcher.is_stopped()
        return None


class Grammars:
    """Compiles grammars for one tokenizer; builds its table for the first grammar."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._table: Any = None
        self._table_lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """Compiles a grammar; thread-safe. Raises RequestError if the grammar is not supported here."""
        name = f"sampling_params.{source.kind}"
        if self._tokenizer is None:
            raise RequestError(f"{name}: a grammar needs a tokenizer, and the model directory has none")
        if not self._eos_ids:
            raise RequestError(f"{name}: a grammar needs an end token, and the model has none")
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError:
            raise RequestError(
                f"{name} needs the package llguidance on the engine's host: {advise_extra('grammar')}"
            ) from None
        try:
            if source.kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source.text, defaults=JSON_OPTIONS)
            else:
                grammar = grammar_from(source.kind, source.text)
            matcher = LLMatcher(self._get_table(name), grammar, log_level=0)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from None
        if matcher.is_error():
            raise RequestError(f"{name}: {matcher.get_error()}")
        return Grammar(matcher, self._eos_ids)

    def _get_table(self, name: str) -> Any:
        with self._table_lock:
            if self._table is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._table = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids)
                    )
                except ValueError as error:
                    raise RequestError(f"{name}: llguidance cannot read this tokenizer: {error}") from None
            return self._table
