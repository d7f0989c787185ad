"""The tool and the task that all client programs share."""

from __future__ import annotations

import json
import os
from typing import Any

MODEL = os.environ["MODEL"]
MOST_TURNS = 6
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}


def calculate(expression: str) -> str:
    """The tool. A model that writes nonsense is told so."""
    try:
        return f"{eval(expression, {'__builtins__': {}}):g}"
    except (ValueError, SyntaxError, NameError, TypeError, ZeroDivisionError) as error:
        return f"error: {error}"


def messages() -> list[Any]:
    with open(os.environ["TASK_FILE"], encoding="utf-8") as file:
        found: list[Any] = json.load(file)["messages"]
    return found
