"""A single-turn environment of verifiers: a word is to be returned in reverse."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset

LETTERS = "abcdefgh"


def load_environment(rows: int = 300, held_out: int = 100, seed: int = 0) -> vf.Environment:
    generator = random.Random(seed)
    words = sorted({"".join(generator.choices(LETTERS, k=3)) for _ in range(2 * (rows + held_out))})
    generator.shuffle(words)
    table = [{"question": word, "answer": word[::-1]} for word in words[: rows + held_out]]

    def exact(completion: list, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)

    def matching(completion: list, answer: str) -> float:
        said = completion[-1]["content"].strip()
        return sum(a == b for a, b in zip(said, answer, strict=False)) / len(answer)

    rubric = vf.Rubric(funcs=[exact, matching], weights=[0.5, 0.5])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(table[held_out:]),
        eval_dataset=Dataset.from_list(table[:held_out]),
        rubric=rubric,
    )
