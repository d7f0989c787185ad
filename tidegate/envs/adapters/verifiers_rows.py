"""Tasks of environments of verifiers, for the environment and the agent of that name."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from tidegate.envs.adapters.library import require
from tidegate.envs.datasets.finite import Finite
from tidegate.errors import ConfigError
from tidegate.types import Task


class VerifiersRows(Finite):
    """Makes a task of each row of a verifiers environment's data.

    Attributes:
        library: The environment's own object.
    """

    def __init__(self, id: str, args: Mapping[str, Any] | None, held_out: int, seed: int) -> None:
        self.id = id
        self.library = load(id, args or {})
        count = len(self.library.get_dataset())
        if self.library.build_eval_dataset() is not None:
            held = [("eval", n) for n in range(min(held_out, len(self.library.get_eval_dataset())))]
            train = [("train", n) for n in range(count)]
        else:
            held = [("train", n) for n in range(min(held_out, count // 2))]
            train = [("train", n) for n in range(len(held), count)]
        eval_tasks = [self._task(*place) for place in held]
        known = {str(task.messages) for task in eval_tasks}
        tasks = [task for task in (self._task(*place) for place in train) if str(task.messages) not in known]
        if not tasks:
            raise ConfigError(f"verifiers:{id} has no training rows besides the held-out ones")
        self._set_tasks(tasks, {"": eval_tasks}, seed)

    def _task(self, split: str, number: int) -> Task:
        name = f"{self.id}-{split}-{number}"
        row = row_of(self.library, name)
        messages = [
            {key: value for key, value in dict(message).items() if value is not None}
            for message in row["prompt"]
        ]
        return Task(name, "verifiers", messages, row.get("answer") or None)


def row_of(library: Any, task_id: str) -> dict[str, Any]:
    """Returns the row of which the task of this id was made, as the input of a rollout."""
    _, split, number = task_id.rsplit("-", 2)
    rows = library.get_dataset() if split == "train" else library.get_eval_dataset()
    return dict(rows[int(number)])


def load(id: str, args: Mapping[str, Any]) -> Any:
    """Returns the environment `id` of verifiers.

    Raises:
        ConfigError: The library or the environment's package is missing, or it cannot be loaded.
    """
    vf = require("verifiers")
    if not hasattr(vf, "load_environment"):
        raise ConfigError(
            "this version of verifiers has no classic environments; docs/adapters.md names one that has"
        )
    module = id.replace("-", "_").split("/")[-1]
    if importlib.util.find_spec(module) is None:
        installed = [one.name for one in pkgutil.iter_modules() if one.ispkg or "_" in one.name]
        close = difflib.get_close_matches(module, installed, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0].replace('_', '-')!r}?" if close else ""
        raise ConfigError(f"there is no installed package {module!r} of an environment verifiers:{id}{hint}")
    try:
        return vf.load_environment(id, **args)
    except Exception as error:
        cause = error.__cause__ or error
        raise ConfigError(f"verifiers:{id} cannot be loaded: {type(cause).__name__}: {cause}") from error
