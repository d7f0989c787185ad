"""Parses reasoning in `<think>…</think>` before the answer.

Some templates end the prompt with `<think>`, so the reply may start inside the block. Text after an unclosed
`<think>` is reasoning to the end of the reply. Whitespace around reasoning is dropped.
"""

from __future__ import annotations

from typing import Literal

from tidegate.gateway.parsing.parts import Part, Reasoning, ReplyParser, partial_suffix

THOUGHT_START, THOUGHT_END = "<think>", "</think>"


class ReasoningParser:
    """Splits off the reasoning and passes the text after it to the parser of the answer."""

    def __init__(self, answer: ReplyParser, opened: bool = False) -> None:
        self._answer = answer
        self._opened = opened
        self._at: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._held = ""  # a possible prefix of a marker, or whitespace that may be dropped
        self._any_reasoning = False

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
        if self._at == "reasoning" or (self._at == "start" and self._opened):
            return [*self._reasoning_part(rest.rstrip()), *self._answer.finish()]
        return [*self._answer.feed(rest), *self._answer.finish()]

    def _start(self, text: str) -> list[Part]:
        """Text before it is certain whether the reply begins with reasoning."""
        solid = text.lstrip()
        if len(solid) < len(THOUGHT_START) and THOUGHT_START.startswith(solid):
            self._held = text
            return []
        if self._opened or solid.startswith(THOUGHT_START):
            self._at = "reasoning"
            return self._reasoning(solid.removeprefix(THOUGHT_START))
        self._at = "answer"
        return self._answer.feed(text)

    def _reasoning(self, text: str) -> list[Part]:
        reasoning, closed, after = text.partition(THOUGHT_END)
        if closed:
            self._at = "gap"
            return [*self._reasoning_part(reasoning.rstrip()), *self._gap(after)]
        certain = text[: len(text) - partial_suffix(text, THOUGHT_END)].rstrip()
        self._held = text[len(certain) :]
        return self._reasoning_part(certain)

    def _gap(self, text: str) -> list[Part]:
        text = text.lstrip()
        if not text:
            return []
        self._at = "answer"
        return self._answer.feed(text)

    def _reasoning_part(self, text: str) -> list[Part]:
        text = text if self._any_reasoning else text.lstrip()
        self._any_reasoning = self._any_reasoning or bool(text)
        return [Reasoning(text)] if text else []
