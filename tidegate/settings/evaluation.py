"""Settings of the evaluations of a run: the section `[eval]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from tidegate.settings.sections import SettingsSection

SuiteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class EvalSuite(SettingsSection):
    set: str = ""
    """Held-out set of the environment (a key of `eval_sets()`); empty: the main one."""
    tasks: Annotated[int, Field(ge=1)] = 200
    """Number of tasks, from the beginning of the set."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    greedy: bool = False
    """Sample at temperature 0 instead of as in training."""


class EvalSettings(SettingsSection):
    first: bool = True
    """Evaluate before the first step."""
    last: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 25
    """Steps between evaluations; 0: only before the first step and after the last."""
    tasks: Annotated[int, Field(ge=1)] = 200
    """Tasks of each held-out set in the evaluations before the first step and after the last."""
    interim_tasks: Annotated[int, Field(ge=1)] = 64
    """Tasks of each held-out set in the other evaluations."""
    suites: dict[SuiteName, EvalSuite] = {}
    """Further evaluations by name, with the settings `set`, `tasks`, `every` and `greedy` of their own, and
    the metrics `eval/<name>/…` (docs/environments.md)."""
    beside_training: bool = False
    """Training continues during the evaluations between the first and the last step."""
    engines: Annotated[int, Field(ge=0)] = 0
    """With `beside_training`: engines that keep the evaluated version and serve only the evaluation, which
    then samples from this version alone. 0, or if too few engines are in service: training and the evaluation
    share all engines."""
    max_versions: Annotated[int, Field(ge=1)] = 2
    """With `beside_training` and without engines of its own: policy versions that an evaluation may sample
    from. A publish that would exceed it waits for the evaluation."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """Episodes of an evaluation that run at the same time."""
    deadline_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of an evaluation; episodes that have not ended by then count as unfinished."""

    @model_validator(mode="after")
    def _consistent(self) -> EvalSettings:
        once = [name for name, suite in self.suites.items() if not suite.every]
        if once and not (self.first or self.last):
            raise ValueError(
                f"suites.{once[0]} is never evaluated, as first and last are false: "
                "set its every, or remove it"
            )
        if not self.beside_training and (idle := self.other_than_default("engines", "max_versions")):
            raise ValueError(f"{idle[0]} has no effect without beside_training = true")
        if self.beside_training and not self.every and len(once) == len(self.suites):
            raise ValueError(
                "beside_training has no effect without evaluations between the first and the last step: set "
                "every, or the every of a suite"
            )
        return self
