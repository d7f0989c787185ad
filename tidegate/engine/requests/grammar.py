"""Replies that follow a grammar, by llguidance: at every token, which ids may come next.

llguidance is a small compiled package without dependencies (`pip install 'tidegate[grammar]'`); where it
is not installed, requests with a grammar are refused and everything else works.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.engine.requests.params import GrammarSource
from tidegate.engine.validation import RequestError

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,16}"}
"""Room to indent; without a bound a reply may be white space for ever."""


class Grammar:
    """How far one reply has come in its grammar."""

    def __init__(self, matcher: Any, eos_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.choices: list[int] = []
        """For each output token: how many ids the grammar left to choose from."""
        self.masses: list[float] = []
        """For each output token: the probability of these ids before the grammar excluded the others."""
        self.done = False
        """The end token was sampled where the grammar allows an end."""

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy(), self._eos_ids)

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Which ids may come next, [vocab_size]; all False where the grammar has failed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        return mask

    def accept(self, token: int, choices: int, mass: float) -> str | None:
        """Go on by a sampled token; returns what went wrong, or None."""
        self.choices.append(choices)
        self.masses.append(mass)
        if not self._matcher.consume_token(token):
            fault = str(self._matcher.get_error()).partition("\n<state>")[0]  # what follows is a dump
            return fault or f"it does not allow the token {token}"
        self.done = token in self._eos_ids and self._matcher.is_stopped()
        return None


class Grammars:
    """Compiles grammars for one tokenizer, whose table is made when the first is asked for."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._table: Any = None
        self._making = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """Any thread may; raises RequestError where the grammar cannot be followed here."""
        name = f"sampling_params.{source.kind}"
        if self._tokenizer is None:
            raise RequestError(f"{name}: this model directory has no tokenizer to follow a grammar with")
        if not self._eos_ids:
            raise RequestError(f"{name}: this model names no end token, which a grammar ends with")
        try:
            from llguidance import LLMatcher, grammar_from
        except ImportError:
            raise RequestError(
                f"{name} needs the package llguidance where the engine runs: pip install 'tidegate[grammar]'"
            ) from None
        try:
            if source.kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(source.text, defaults=JSON_OPTIONS)
            else:
                grammar = grammar_from(source.kind, source.text)
            matcher = LLMatcher(self._made_table(name), grammar, log_level=0)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from None
        if matcher.is_error():
            raise RequestError(f"{name}: {matcher.get_error()}")
        return Grammar(matcher, self._eos_ids)

    def _made_table(self, name: str) -> Any:
        with self._making:
            if self._table is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._table = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids)
                    )
                except ValueError as error:
                    raise RequestError(
                        f"{name}: this tokenizer cannot be read by llguidance: {error}"
                    ) from None
            return self._table
