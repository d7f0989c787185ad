"""A fake decoder for the scheduler. Its cache holds the tokens themselves, so a row that is wrongly moved,
dropped or recomputed yields a different next token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.requests.request import Generation, PromptScores
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.engine.scheduling.slots import Slots
from tidegate.types import LISTED

VOCAB = 1000


def next_token(tokens: Sequence[int], weights: int) -> int:
    return hash((weights, *tokens)) % VOCAB


class Copied(list[tuple[int, int]]):
    nbytes = 100


class Remembering:
    """Rows of (token, weights it was computed with).

    Faults: `refuses` fails prefills that contain a token, `nan_for` returns NaN for prompts that begin with a
    token, `dies` fails every step.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.weights = 0
        self.refuses: int | None = None
        self.nan_for: int | None = None
        self.dies = False
        self.prefills: list[list[int]] = []
        self.cleaned: list[int] = []

    @property
    def cache(self) -> Remembering:
        return self

    def serves(self, adapter: str) -> bool:
        return not adapter

    def prefill(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        adapters: Sequence[str] = (),
    ) -> None:
        if any(self.refuses in sequence for sequence in sequences):
            raise RuntimeError("cannot compute this")
        self.prefills.append([len(sequence) for sequence in sequences])
        for row, (sequence, length) in enumerate(zip(sequences, held, strict=True), first):
            self._write(row, length, sequence)

    max_scored_tokens = 64

    def score(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        targets: Sequence[Sequence[int]],
        top: int = 0,
        adapters: Sequence[str] = (),
    ) -> list[PromptScores]:
        """A target's logprob is −target, or NaN; the likeliest ids at a target begin with it."""
        self.prefill(first, sequences, held)
        return [
            PromptScores(
                [float("nan") if self.nan_for in ids else -float(target) for target in wanted],
                [[(-float(target), target + at) for at in range(top)] for target in wanted] if top else [],
            )
            for ids, wanted in zip(sequences, targets, strict=True)
        ]

    def _write(self, row: int, length: int, tokens: Sequence[int]) -> None:
        past = self.rows.get(row, [])[:length]
        assert len(past) == length
        self.rows[row] = past + [(token, self.weights) for token in tokens]

    def decode(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        if self.dies:
            raise RuntimeError("out of memory")
        ids, logprobs = [], []
        for row in range(slots.count):
            self._write(row, int(slots.lengths[row]), [int(slots.tokens[row])])
            tokens = [token for token, _ in self.rows[row]]
            stale = any(weights != self.weights for _, weights in self.rows[row])
            ids.append(-1 if stale else next_token(tokens, self.weights))
            logprobs.append(float("nan") if self.nan_for == tokens[0] else -float(self.weights))
        listed = range(int(slots.listed[: slots.count].max(initial=0)))
        slots.top = np.array([[(-float(token + at), token + at) for at in listed] for token in ids], LISTED)
        return np.array(ids), np.array(logprobs)

    def move(self, source: int, target: int, length: int) -> None:
        self.rows[target] = self.rows[source][:length]

    def snapshot(self, row: int, length: int) -> Copied:
        assert len(self.rows[row]) >= length
        return Copied(self.rows[row][:length])

    def restore(self, row: int, snapshot: Copied, length: int) -> None:
        self.rows[row] = snapshot[:length]

    def zero_row(self, row: int) -> None:
        self.rows[row] = []
        self.cleaned.append(row)

    def drop(self) -> None:
        self.rows.clear()

    def copy_weights(self, weights: Any) -> None:
        self.weights = weights


def generation(prompt: Sequence[int], limit: int = 5, rid: str = "", **more: Any) -> Generation:
    return Generation(
        rid or f"r{id(object())}-{random.random()}", list(prompt), SamplingParams(), limit, **more
    )


def submit(scheduler: Scheduler, *generations: Generation) -> None:
    for one in generations:
        scheduler.submit(one)


def drain(scheduler: Scheduler, *generations: Generation) -> None:
    for _ in range(1000):
        if all(one.ended for one in generations):
            return
        scheduler.run_once()
    raise AssertionError("they did not end")


def between_steps(scheduler: Scheduler, action: Callable[[], Any]) -> None:
    result = scheduler.call(action)
    scheduler.run_once()
    result.result(0)


def expected_output(one: Generation) -> list[int]:
    """The tokens of an undisturbed request; its version spans give the weights."""
    tokens = list(one.prompt_ids)
    for version, start, end in one.spans:
        for _ in range(start, end):
            tokens.append(next_token(tokens, int(version)))
    return tokens[len(one.prompt_ids) :]
