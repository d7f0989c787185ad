"""GSM8K: 8,792 word problems of grade-school mathematics (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from tidegate.envs.datasets.finite import Finite
from tidegate.envs.datasets.prompts import Prompt
from tidegate.envs.datasets.rows import DataRow, read_rows
from tidegate.envs.grading.graders import GRADERS, first_hash
from tidegate.envs.grading.math_verify import require_math_verify
from tidegate.envs.rewards import Reward
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.program import advise_extra
from tidegate.types import Task

MODES = {
    "tolerant": "numeric",
    "verl_strict": "verl_strict",
    "verl_flexible": "verl_flexible",
    "math_verify": "math_verify",
}
"""Mode → name of its reward function."""
HUB_ID = "openai/gsm8k"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class GSM8K(Finite):
    """The published splits: `train` is trained on, `test` is held out.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl` as published, or a data set's id on the Hugging
            Face hub (needs the extra `data`).
        mode: How an answer is read and compared: `tolerant` (any usual form, exact numbers), `verl_strict`
        and `verl_flexible` (as verl does), or `math_verify` (needs the extra `math`).
        prompt: Template of the prompt, such as `"{question}\\nThink."`.
        system: System message before the prompt.
        seed: Determines the order of training.

    Raises:
        ConfigError: The data is missing or a row is invalid.
    """

    name: ClassVar[str] = "gsm8k"

    def __init__(
        self,
        path: str = HUB_ID,
        mode: str = "tolerant",
        prompt: str = "{question}",
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"gsm8k: there is no mode {mode!r}{did_you_mean(mode, MODES)}; there are {', '.join(MODES)}"
            )
        if mode == "math_verify":
            require_math_verify("gsm8k: mode = 'math_verify'")
        self.rewards = (Reward("correct", GRADERS[MODES[mode]]),)
        self._prompt = Prompt(prompt, system)
        splits = _load(path)
        train, test = (
            [self._task(f"{split}-{n}", row) for n, row in enumerate(splits[split])]
            for split in ("train", "test")
        )
        self._set_tasks(train, {"": test}, seed)

    def gold_output(self, task: Task) -> str:
        """Returns the published solution, whose last line is `#### answer`."""
        solution: str = task.info["solution"]
        return solution

    def _task(self, id: str, row: DataRow) -> Task:
        solution = row.text("answer")
        answer = first_hash(solution)
        if answer is None:
            raise row.error("'answer' has no line '#### number'")
        return Task(id, self.name, self._prompt.messages(row), answer, {"solution": solution})


def _load(path: str) -> dict[str, list[DataRow]]:
    directory = Path(path)
    if directory.is_dir():
        return {split: read_rows(directory / f"{split}.jsonl") for split in ("train", "test")}
    if directory.exists():
        raise ConfigError(
            f"gsm8k: path = {path!r} is a file; name the directory of train.jsonl and test.jsonl"
        )
    if not _HUB_ID.fullmatch(path):
        raise ConfigError(f"gsm8k: path = {path!r}: there is no such directory")
    return _from_hub(path)


def _from_hub(dataset_id: str) -> dict[str, list[DataRow]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            f"gsm8k: path = {dataset_id!r} is not a directory, and reading it from the hub needs the "
            f"library datasets: {advise_extra('data')}, or name a directory with train.jsonl and "
            "test.jsonl"
        ) from None
    try:
        splits: Any = load_dataset(dataset_id, "main")
        return {split: _rows(dataset_id, split, splits[split]) for split in ("train", "test")}
    except Exception as error:
        raise ConfigError(
            f"gsm8k: {dataset_id!r} could not be read from the hub: {type(error).__name__}: {error}"
        ) from error


def _rows(dataset_id: str, split: str, rows: Any) -> list[DataRow]:
    return [DataRow(Path(f"{dataset_id}/{split}"), number, dict(row)) for number, row in enumerate(rows, 1)]
