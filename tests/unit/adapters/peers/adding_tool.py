"""A tool environment of verifiers: sums that a tool computes."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def load_environment(rows: int = 300, seed: int = 0) -> vf.Environment:
    generator = random.Random(seed)
    pairs = [(generator.randrange(1000), generator.randrange(1000)) for _ in range(rows)]
    table = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in pairs]

    def right(completion: list, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(table), rubric=vf.Rubric(funcs=[right]))
