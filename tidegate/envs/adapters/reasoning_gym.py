"""Data sets of reasoning-gym: `env.use = "reasoning_gym:spell_backward"`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tidegate.envs.adapters.library import require, task_seed
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.types import Task

EXTRA = "reasoning-gym"
CHUNK = 500
"""Tasks that come from one seed of the data set."""
DRAWS = 64
"""Attempts to draw a training task that is not held out."""


class ReasoningGym(Environment):
    """Tasks that a data set of reasoning-gym generates, scored by the data set.

    Args:
        id: Name of the data set.
        config: Settings of the data set's own configuration, except `seed` and `size`.
        held_out: Number of held-out tasks. Their questions never occur in training.
        seed: Determines the tasks.
        system: System message before the question; "default": reasoning-gym's own, which asks for
            `<answer>` tags; empty: none.
        answer_tag: True: the text in the last `<answer>…</answer>` is scored, as by reasoning-gym's own
            evaluation. False: the whole output, without surrounding blanks.

    Raises:
        ConfigError: The library is missing, or it has no such data set or setting.
    """

    name: ClassVar[str] = "reasoning_gym"

    def __init__(
        self,
        id: str,
        config: Mapping[str, Any] | None = None,
        held_out: int = 100,
        seed: int = 0,
        system: str = "default",
        answer_tag: bool = True,
    ) -> None:
        factory = require("reasoning_gym.factory", EXTRA)
        utils = require("reasoning_gym.utils", EXTRA)
        if id not in factory.DATASETS:
            raise ConfigError(f"reasoning_gym has no data set {id!r}{did_you_mean(id, factory.DATASETS)}")
        settings = dict(config or {})
        known = set(inspect.signature(factory.DATASETS[id][1]).parameters) - {"seed", "size"}
        for key in settings:
            if key not in known:
                raise ConfigError(f"reasoning_gym:{id} has no setting config.{key}{did_you_mean(key, known)}")
        self._id, self._seed, self._tag = id, seed, answer_tag
        self._system = utils.SYSTEM_PROMPTS["default"] if system == "default" else system
        self._extract = utils.extract_answer
        self._make = functools.partial(factory.create_dataset, id, **settings, size=CHUNK)
        self._data = functools.lru_cache(maxsize=8)(self._generated)
        self.rewards = (Reward("score", self._score),)
        try:
            self._held_out = self._distinct(held_out)
        except (AssertionError, ValueError, TypeError) as error:
            raise ConfigError(f"reasoning_gym:{id} refuses its config: {error}") from error
        self._excluded = frozenset(map(_question, self._held_out))

    def train_task(self, index: int) -> Task:
        for draw in range(DRAWS):
            task = self._task("train", draw, index)
            if _question(task) not in self._excluded:
                return task
        raise ConfigError(
            f"reasoning_gym:{self._id}: {DRAWS} draws for the training task {index} gave held-out questions "
            f"only: the data set has few distinct questions; lower held_out = {len(self._held_out)}"
        )

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": self._held_out}

    def gold_output(self, task: Task) -> str | None:
        answer = None if task.answer is None else str(task.answer)
        return f"<answer>{answer}</answer>" if self._tag and answer is not None else answer

    def _score(self, output: str | None, task: Task) -> float:
        answer = self._extract(output or "") if self._tag else (output or "").strip()
        split, draw, index = task.info["item"]
        data = self._data(split, draw, index // CHUNK)
        return float(data.score_answer(answer, data[index % CHUNK]))

    def _distinct(self, number: int) -> list[Task]:
        """Returns held-out tasks with different questions: fewer than asked for if the data set has fewer."""
        tasks: dict[str, Task] = {}
        for index in range(number * 8):
            if len(tasks) < number:
                task = self._task("eval", 0, index)
                tasks.setdefault(_question(task), task)
        return list(tasks.values())

    def _task(self, split: str, draw: int, index: int) -> Task:
        entry = self._data(split, draw, index // CHUNK)[index % CHUNK]
        messages = [{"role": "user", "content": entry["question"]}]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        name = f"{self._id}-{split}-{index}"
        return Task(name, self.name, messages, entry["answer"], {"item": [split, draw, index]})

    def _generated(self, split: str, draw: int, chunk: int) -> Any:
        return self._make(seed=task_seed(self._seed, split, draw, chunk))


def _question(task: Task) -> str:
    return str(task.messages[-1]["content"])
