"""Reasoning as models write it: `<think>…</think>`, before the answer.

The prompt may have opened it already, for some templates end with `<think>`. What is never closed is
reasoning to its end. Whitespace around reasoning belongs to nothing.
"""

from __future__ import annotations

from typing import Literal

from tidegate.gateway.parsing.parts import Part, Reasoning, ReplyParser, partial_suffix

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Gives the reasoning, and leaves what follows it to the parser of the answer."""

    def __init__(self, answer: ReplyParser, begun: bool = False) -> None:
        self._answer = answer
        self._begun = begun
        self._at: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._held = ""  # text that may be the beginning of a marker, or whitespace that may be none's
        self._said = False  # some reasoning was given

    @property
    def status(self) -> str | None:
        return self._answer.status

    def feed(self, text: str) -> list[Part]:
        if self._at == "answer":
            return self._answer.feed(text)
        text, self._held = self._held + text, ""
        if self._at == "start":
            return self._start(text)
        return self._reasoning(text) if self._at == "reasoning" else self._gap(text)

    def finish(self) -> list[Part]:
        rest, self._held = self._held, ""
        if self._at == "reasoning" or (self._at == "start" and self._begun):
            return [*self._thought(rest.rstrip()), *self._answer.finish()]
        return [*self._answer.feed(rest), *self._answer.finish()]

    def _start(self, text: str) -> list[Part]:
        """It is not known yet whether the reply reasons."""
        solid = text.lstrip()
        if len(solid) < len(OPEN) and OPEN.startswith(solid):
            self._held = text
            return []
        if self._begun or solid.startswith(OPEN):
            self._at = "reasoning"
            return self._reasoning(solid.removeprefix(OPEN))
        self._at = "answer"
        return self._answer.feed(text)

    def _reasoning(self, text: str) -> list[Part]:
        thought, closed, after = text.partition(CLOSE)
        if closed:
            self._at = "gap"
            return [*self._thought(thought.rstrip()), *self._gap(after)]
        certain = text[: len(text) - partial_suffix(text, CLOSE)].rstrip()
        self._held = text[len(certain) :]
        return self._thought(certain)

    def _gap(self, text: str) -> list[Part]:
        text = text.lstrip()
        if not text:
            return []
        self._at = "answer"
        return self._answer.feed(text)

    def _thought(self, text: str) -> list[Part]:
        text = text if self._said else text.lstrip()
        self._said = self._said or bool(text)
        return [Reasoning(text)] if text else []
