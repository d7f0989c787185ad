"""Finds the questions and answers of a data file, and the reward that fits the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.envs.answers import gold, number
from tidegate.envs.datasets.dataset import EVAL_FRACTION, Dataset
from tidegate.envs.datasets.rows import read_rows
from tidegate.errors import ConfigError

QUESTIONS = ("question", "prompt", "problem", "input", "instruction", "messages")
ANSWERS = ("answer", "solution", "output", "target")
BRIEF = "Reply with the answer only."
_MATH_SHARE = 0.75
_LATEX = re.compile(r"\\[A-Za-z]+|\^")
_LONG = 60


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file as the environment `dataset` uses it."""

    options: dict[str, Any]
    """`env.options` of the environment."""
    reason: str
    """Why the reward fits the answers."""
    train: int
    """Number of training tasks."""
    held_out: int
    """Number of held-out tasks."""
    skipped: Sequence[str]
    """Descriptions of the rows that cannot be used."""
    long_answers: bool
    """Whether answers are compared as text although half of them are longer than 60 characters."""


def inspect_data(path: Path, question: str | None = None, answer: str | None = None) -> DataFile:
    """Reads a data file and decides how the environment `dataset` uses it.

    Args:
        path: A `.jsonl`, `.csv` or `.parquet` file.
        question: Column of the questions; None: it is found by its name.
        answer: Column of the answers; None: it is found by its name.

    Raises:
        ConfigError: The file cannot be read, a column is not found or not certain, or no row can be used.
    """
    columns = list(dict.fromkeys(key for row in read_rows(path) for key in row.values))
    question = _column(path, columns, "question", question, QUESTIONS)
    conversation = question == "messages" and not set(ANSWERS) & set(columns)
    answer = (
        question if conversation and answer is None else _column(path, columns, "answer", answer, ANSWERS)
    )
    options: dict[str, Any] = {"path": str(path.absolute()), "prompt": question, "answer": answer}
    options["eval_fraction"] = EVAL_FRACTION
    data = Dataset(**options, skip_invalid=True)
    if data.skipped:
        options["skip_invalid"] = True
    held_out = data.eval_sets()[""]
    tasks = [*(data.train_task(index) for index in range(data.train_size())), *held_out]
    answers = [one for task in tasks for one in _listed(task.answer)]
    reward, reason = _reward(answers)
    options["rewards"] = [reward]
    texts = all(isinstance(task.info.get(question), str) for task in tasks)
    if reward == "exact_match" and texts and question.isidentifier():
        options["prompt"] = f"{{{question}}}\n{BRIEF}"
    middle = sorted(len(str(one)) for one in answers)[len(answers) // 2]
    long = reward == "exact_match" and middle > _LONG
    return DataFile(options, reason, data.train_size(), len(held_out), data.skipped, long)


def _column(path: Path, columns: Sequence[str], what: str, given: str | None, names: Sequence[str]) -> str:
    has = f"{path} has the columns {', '.join(columns) or '(none)'}"
    if given is not None:
        if given not in columns:
            raise ConfigError(f"there is no column {given!r} for --{what}: {has}")
        return given
    found = [column for column in columns if column.strip().lower() in names]
    if len(found) == 1:
        return found[0]
    problem = (
        f"{' and '.join(found)} may each be the {what}" if found else f"none is named {', '.join(names)}"
    )
    raise ConfigError(f"{has}; {problem}: name the columns with --question COLUMN --answer COLUMN")


def _reward(answers: Sequence[Any]) -> tuple[str, str]:
    """Returns the name of the reward that fits, and the reason."""
    numbers = sum(map(_is_number, answers))
    if numbers == len(answers):
        return "numeric", "all answers are numbers"
    latex = sum(_LATEX.search(str(one)) is not None for one in answers if not _is_number(one))
    if latex and numbers + latex >= _MATH_SHARE * len(answers):
        return "math_verify", f"{latex} of {len(answers)} answers are LaTeX and {numbers} are numbers"
    return "exact_match", f"{len(answers) - numbers} of {len(answers)} answers are text"


def _is_number(answer: Any) -> bool:
    if isinstance(answer, str):
        return number(answer) is not None or ("####" in answer and gold(answer) is not None)
    return isinstance(answer, int | float) and not isinstance(answer, bool)


def _listed(answer: Any) -> Sequence[Any]:
    return answer if isinstance(answer, list) else [answer]
