"""Makes the messages of a task from a row of data."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from typing import Any

from tidegate.envs.datasets.rows import DataRow
from tidegate.errors import ConfigError
from tidegate.types import Message

_NAME = re.compile(r"[^\W\d]\w*")


class Prompt:
    """Template of a task's messages.

    Args:
        prompt: A column's name, or a text with columns in braces: `"{question}\\nThink first."`. A column may
            contain a list of messages (`role`, `content`).
        system: System message before the others.

    Raises:
        ConfigError: The text's braces are invalid.
    """

    def __init__(self, prompt: str, system: str | None = None) -> None:
        self._template = prompt
        self._system = system
        self.columns = _columns(prompt) or [prompt]
        self._is_column = "{" not in prompt and "}" not in prompt

    def messages(self, row: DataRow) -> list[Message]:
        """Raises ConfigError, which names row and column, if a value is invalid."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        if not self._is_column:
            return [*system, {"role": "user", "content": self._fill(row)}]
        value = row[self._template]
        if isinstance(value, list):
            return [*system, *_checked(row, self._template, value)]
        return [*system, {"role": "user", "content": row.text(self._template)}]

    def _fill(self, row: DataRow) -> str:
        values = {}
        for name in self.columns:
            value = row[name]
            if value is None or isinstance(value, dict | list):
                raise row.error(f"{name!r} is neither text nor a number, so the prompt cannot contain it")
            values[name] = value
        return self._template.format_map(values)


def split_reply(row: DataRow, column: str) -> tuple[DataRow, str]:
    """Returns the row without the last message of a column, and that message's text.

    Raises:
        ConfigError: The column contains no list of messages that ends with a text of the assistant.
    """
    messages = row[column]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise row.error(f"{column!r} does not end with a message of the assistant, which would be the answer")
    if not isinstance(last.get("content"), str):
        raise row.error(f"the last message of {column!r} is not a text")
    return replace(row, values={**row.values, column: messages[:-1]}), last["content"]


def _columns(template: str) -> list[str]:
    try:
        fields = [
            (name, spec, conversion)
            for _, name, spec, conversion in Formatter().parse(template)
            if name is not None
        ]
    except ValueError as error:
        raise ConfigError(f"prompt = {template!r}: {error}; double each literal brace") from None
    for name, spec, conversion in fields:
        if not _NAME.fullmatch(name) or spec or conversion:
            raise ConfigError(
                f"prompt = {template!r}: braces must contain a column's name only, not {name!r}; "
                "double each literal brace"
            )
    return list(dict.fromkeys(name for name, _, _ in fields))


def _checked(row: DataRow, key: str, messages: list[Any]) -> list[Message]:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.error(f"{key!r} is a list, but not of messages with a role and a content")
    if not messages:
        raise row.error(f"{key!r} contains no message")
    return messages
