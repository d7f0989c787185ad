"""What the tests of the doctor's checks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tidegate.config import Settings
from tidegate.doctor.findings import Finding, Level
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.scaffold.init import TINY_BASE
from tidegate.types import Task


def settings_of(model: Path = TINY_BASE, **more: dict[str, Any]) -> Settings:
    return Settings.model_validate({"model": {"path": str(model)}, **more})


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings if finding.level is not Level.OK]


class Sound(Environment):
    name: ClassVar[str] = "sound"
    rewards = (Reward("exact", exact_answer),)

    def train_task(self, index: int) -> Task:
        return self.task(f"t{index}", index)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.task("h", 9000)]}

    def task(self, id: str, number: int) -> Task:
        return Task(id, "sound", [{"role": "user", "content": f"{number} + 2?"}], f"#### {number + 2}")
