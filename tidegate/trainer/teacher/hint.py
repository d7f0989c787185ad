"""A hint that only the teacher reads: tokens of a system message before the student's prompt."""

from __future__ import annotations

from typing import Any

from tidegate.errors import StartError

ANSWER = "{answer}"
"""Stands for the task's gold answer in a hint."""


class Hint:
    """Renders a hint with the student's chat template.

    Raises StartError if the template has no system message.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._text = text
        self._tokenizer = tokenizer
        # At the start of the run, so that a template without system messages is refused before any sampling.
        self._render(text)

    def prepend(self, ids: list[int], answer: Any) -> list[int]:
        """Return a sequence after the hint, for a task with this gold answer.

        The hint's tokens replace one that begins every text (BOS), so that it is not repeated.
        """
        hint = self._render(self._text.replace(ANSWER, str(answer)))
        repeated = ids[0] == hint[0] == self._tokenizer.bos_token_id
        return [*hint, *ids[repeated:]]

    def _render(self, text: str) -> list[int]:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "system", "content": text}], tokenize=False, add_generation_prompt=False
            )
        except Exception as error:  # templates raise what they like
            raise StartError(
                f"trainer.teacher.hint: the chat template renders no system message alone: {error}"
            ) from error
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids
