"""How a row of data becomes the messages that an agent is given."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from tidegate.envs.datasets.rows import DataRow
from tidegate.errors import ConfigError
from tidegate.types import Message

_NAME = re.compile(r"[^\W\d]\w*")


class Prompt:
    """`prompt` is a column's name, or a text with columns in braces: `"{question}\\nThink first."`.

    A column that holds a list of messages (`role`, `content`) is taken as it is. `system` goes before
    them. Raises ConfigError where the text's braces don't make sense.
    """

    def __init__(self, prompt: str, system: str | None = None) -> None:
        self._template = prompt
        self._system = system
        self.columns = _columns(prompt) or [prompt]
        self._is_column = "{" not in prompt and "}" not in prompt

    def messages(self, row: DataRow) -> list[Message]:
        """Raises ConfigError that names the row and the column that will not do."""
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
                raise row.error(f"{name!r} is no text or number, so the prompt cannot hold it")
            values[name] = value
        return self._template.format_map(values)


def _columns(template: str) -> list[str]:
    """The columns that a template names; none where it has no braces."""
    try:
        fields = [(name, spec, how) for _, name, spec, how in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"prompt = {template!r}: {error}; a brace that is meant is doubled") from None
    for name, spec, how in fields:
        if not _NAME.fullmatch(name) or spec or how:
            raise ConfigError(
                f"prompt = {template!r}: braces hold a column's name and nothing else, not {name!r}; "
                "a brace that is meant is doubled"
            )
    return list(dict.fromkeys(name for name, _, _ in fields))


def _checked(row: DataRow, key: str, messages: list[Any]) -> list[Message]:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise row.error(f"{key!r} is a list, but not of messages with a role and a content")
    if not messages:
        raise row.error(f"{key!r} holds no message")
    return messages
