"""Settings of the choice of training tasks: `[trainer.curriculum] name = "difficulty"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tidegate.settings.sections import SettingsSection


class CurriculumSettings(SettingsSection):
    selector: ClassVar[str] = "name"
    of_kind: ClassVar[Mapping[str, str]] = {"floor": "difficulty"}

    name: Literal["uniform", "difficulty"] = "uniform"
    """Which training tasks are issued. uniform: all, in the environment's order. difficulty: tasks whose
    groups probably have equal rewards are skipped (docs/curriculum.md)."""
    floor: Annotated[float, Field(ge=0.01, lt=1)] = 0.05
    """Least probability with which a task is issued."""

    @model_validator(mode="after")
    def _consistent(self) -> CurriculumSettings:
        if self.name != "difficulty" and self.other_than_default("floor"):
            raise ValueError(f'floor is for name = "difficulty"; it has no effect with "{self.name}"')
        return self
