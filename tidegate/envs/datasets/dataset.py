"""The environment `dataset`: rows of the user's JSONL, CSV or parquet file, configured by settings alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.datasets.prompts import Prompt, split_reply
from tidegate.envs.datasets.rows import DataRow, read_rows
from tidegate.envs.grading.graders import GRADERS
from tidegate.envs.grading.math_verify import require_math_verify
from tidegate.envs.rewards import Reward
from tidegate.errors import ConfigError
from tidegate.loading import check_object, did_you_mean, load_object
from tidegate.types import Task

EVAL_FRACTION = 0.1
_REWARD_KEYS = ("use", "weight", "name")
_BUILT_IN = {name: f"tidegate.envs.grading.graders:{name}" for name in GRADERS}


class Dataset(Finite):
    """Makes a task of each row of a file. Columns other than the answer become the task's `info`.

    Args:
        path: A `.jsonl`, `.csv` or `.parquet` file.
        eval_path: Another such file with the held-out rows.
        eval_fraction: Share of the rows of `path` that is held out, instead of `eval_path` (default 0.1). A
            hash of the prompt selects them, so equal prompts are on the same side, and the order of the file
            does not matter.
        prompt: Name of the column with the prompt, or a template with columns in braces.
        answer: Column with the answer; "" or None if the rewards need none. If it is the column of `prompt`,
            which contains messages, the answer is the last one, which must be the assistant's.
        system: System message before the prompt.
        rewards: Names of built-in functions, `file.py:function`, or tables `{use, weight, name}` of them.
        seed: Determines the order of training.
        skip_invalid: Leave out rows whose prompt or answer is missing, empty or of another type, which are
            otherwise refused.

    Attributes:
        skipped: Descriptions of the rows that were left out, with file and line.

    Raises:
        ConfigError: An option or a row is invalid; the message names file, line and key.
    """

    name: ClassVar[str] = "dataset"

    def __init__(
        self,
        path: str,
        eval_path: str | None = None,
        *,
        eval_fraction: float | None = None,
        prompt: str = "prompt",
        answer: str | None = "answer",
        system: str | None = None,
        rewards: Sequence[Any] = ("exact_match",),
        seed: int = 0,
        skip_invalid: bool = False,
    ) -> None:
        if eval_path is not None and eval_fraction is not None:
            raise ConfigError(
                "dataset: eval_path and eval_fraction exclude each other; remove one of the two"
            )
        self.rewards = tuple(_reward(reward) for reward in _listed(rewards))
        self._prompt = Prompt(prompt, system)
        self._answer = answer or None
        self._reply = answer == prompt
        self._skip_invalid = skip_invalid
        self.skipped: list[str] = []
        tasks = self._tasks(read_rows(Path(path)), "row")
        if eval_path is not None:
            train, held_out = tasks, self._tasks(read_rows(Path(eval_path)), "eval")
        else:
            fraction = EVAL_FRACTION if eval_fraction is None else eval_fraction
            train, held_out = _split(tasks, fraction, path)
        self._set_tasks(train, {"": held_out}, seed)

    def gold_output(self, task: Task) -> str | None:
        answer = task.answer[0] if isinstance(task.answer, list) and task.answer else task.answer
        if answer is None:
            return None
        marked = any(reward.fn is GRADERS["math_verify"] for reward in self.rewards)
        if marked and "\\boxed" not in str(answer):
            return f"\\boxed{{{answer}}}"  # math-verify finds most expressions only if they are marked
        return str(answer)

    def _tasks(self, rows: Sequence[DataRow], kind: str) -> list[Task]:
        tasks = []
        for row in rows:
            try:
                tasks.append(self._task(f"{kind}-{row.number}", row))
            except ConfigError as error:
                if not self._skip_invalid:
                    raise
                self.skipped.append(str(error))
        if not tasks:
            raise ConfigError(f"no row can be used; the first one: {self.skipped[-len(rows)]}")
        return tasks

    def _task(self, id: str, row: DataRow) -> Task:
        prompt, answer = row, None
        if self._reply and self._answer is not None:
            prompt, answer = split_reply(row, self._answer)
        elif self._answer is not None:
            answer = row[self._answer]
        messages = self._prompt.messages(prompt)
        if self._answer and any(value is None or not str(value).strip() for value in _listed_answers(answer)):
            raise row.error(f'{self._answer!r} is empty; set answer = "" if the rows have none')
        info = {key: value for key, value in row.values.items() if key != self._answer}
        return Task(id, self.name, messages, answer, info)


def _split(tasks: Sequence[Task], fraction: float, path: str) -> tuple[list[Task], list[Task]]:
    if not 0 < fraction < 1:
        raise ConfigError(f"dataset: eval_fraction = {fraction} is not between 0 and 1")
    keys = [_digest(task) for task in tasks]
    distinct = sorted(set(keys))
    if len(distinct) < 2:
        raise ConfigError(
            f"{path}: a single prompt cannot be split into training and held-out rows; set eval_path, "
            "which may be the same file if nothing is trained"
        )
    held = set(distinct[: min(len(distinct) - 1, max(1, math.ceil(fraction * len(distinct))))])
    train = [task for key, task in zip(keys, tasks, strict=True) if key not in held]
    return train, [task for key, task in zip(keys, tasks, strict=True) if key in held]


def _digest(task: Task) -> bytes:
    text = json.dumps(list(task.messages), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _listed_answers(answer: Any) -> Sequence[Any]:
    """Returns a list of the answers; an empty list counts as an empty answer."""
    return (answer or [None]) if isinstance(answer, list) else [answer]


def _listed(rewards: Any) -> Sequence[Any]:
    if isinstance(rewards, str | Mapping):
        return [rewards]
    if not isinstance(rewards, Sequence) or not rewards:
        raise ConfigError("dataset: rewards must list names, 'file.py:function', or tables {use, weight}")
    return rewards


def check_rewards(rewards: Any) -> None:
    """Raises ConfigError if `rewards` names a function that does not exist. Reads its file, and imports
    nothing."""
    for entry in _listed(rewards):
        check_object(_table(entry)["use"], _BUILT_IN, "reward")


def _table(entry: Any) -> Mapping[str, Any]:
    table = {"use": entry} if isinstance(entry, str) else entry
    if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
        raise ConfigError(f"dataset: the reward {entry!r} needs a 'use': a built-in name or file.py:function")
    for key in table:
        if key not in _REWARD_KEYS:
            raise ConfigError(f"dataset: a reward has no setting {key!r}{did_you_mean(key, _REWARD_KEYS)}")
    return table


def _reward(entry: Any) -> Reward:
    table = _table(entry)
    use, weight = table["use"], table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"dataset: the reward {use!r} has the weight {weight!r}, which is not a number")
    if use == "math_verify":
        require_math_verify("the reward 'math_verify'")
    function = load_object(use, _BUILT_IN, "reward")
    if not callable(function):
        raise ConfigError(f"dataset: the reward {use!r} is not a function, but {type(function).__name__}")
    return Reward(str(table.get("name", use.rpartition(":")[2])), function, float(weight))
