"""Shared parts of the agent frameworks' programs: a dialect, `whole` or `stream`, a tool and a report."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

from calculator import calculate, messages

DIALECT = sys.argv[1]
STREAM = sys.argv[2:] == ["stream"]
INSTRUCTIONS = "Solve the problem with the calculator."
QUESTION = str(messages()[-1]["content"])
QUESTIONS = [QUESTION, "Is that more than 100?"]
"""The second goes on with the conversation of the first."""
calls: list[str] = []


def calculator(expression: str) -> str:
    """Works out an expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    calls.append(expression)
    return calculate(expression)


def report(package: str, *answers: Any) -> None:
    version = importlib.metadata.version(package)
    print(json.dumps({"answers": [str(answer) for answer in answers], "calls": calls, "version": version}))
