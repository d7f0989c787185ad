"""Settings of a judge, a model that scores episodes: `[env.judge]`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tidegate.errors import ConfigError
from tidegate.settings.sections import HttpUrl, SettingsSection

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class CriterionSettings(SettingsSection):
    rubric: Annotated[str, Field(min_length=1)]
    """What the criterion demands."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight in the mean of the criteria."""


class JudgeSettings(SettingsSection):
    of_kind: ClassVar[Mapping[str, str]] = {"criteria": "criteria"}

    url: HttpUrl | None = None
    """OpenAI-compatible endpoint of a model that scores episodes, such as http://host:8002/v1
    (docs/judges.md). None: there is no judge."""
    model: str = ""
    """Name of the model at that endpoint."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's key."""
    kind: Literal["score", "criteria", "ranking"] = "score"
    """Scores that the judge returns. score: one for an episode; criteria: one for each of `criteria`;
    ranking: one for each episode of a group, all compared in one call."""
    rubric: str = ""
    """Description of a good episode."""
    rubric_file: Path | None = None
    """Text file with the rubric, instead of `rubric`."""
    criteria: dict[str, CriterionSettings] = {}
    """Named criteria, each a table `{rubric, weight}`; their weighted mean is the score."""
    show_answer: bool = False
    """Whether the judge sees the task's gold answer."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the judge's score in the reward."""
    environment_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the environment's own reward; 0: training uses the judge alone."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """Calls before a verdict fails: the episode ends as infra_error, or as reward_error if a reply was
    invalid."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Deadline of one call."""
    max_concurrency: Annotated[int, Field(ge=1)] = 16
    """Calls at the same time; others queue."""
    options: dict[str, Any] = {"temperature": 0}
    """Further fields of each request, such as max_tokens."""

    @field_validator("criteria")
    @classmethod
    def _named(cls, criteria: dict[str, CriterionSettings]) -> dict[str, CriterionSettings]:
        for name in criteria:
            if not _NAME.fullmatch(name):
                raise ValueError(f"the criterion {name!r} needs a name of small letters, digits and _")
        return criteria

    @model_validator(mode="after")
    def _consistent(self) -> JudgeSettings:
        if self.url is None:
            if idle := self.other_than_default(*type(self).model_fields):
                raise ValueError(f"env.judge.{idle[0]} has no effect without env.judge.url")
            return self
        if not self.model:
            raise ValueError("env.judge.url needs env.judge.model, the name of the model there")
        if self.rubric and self.rubric_file is not None:
            raise ValueError("env.judge.rubric and env.judge.rubric_file exclude each other")
        if self.kind == "criteria" and not self.criteria:
            raise ValueError('env.judge.kind = "criteria" needs env.judge.criteria')
        if self.kind != "criteria" and self.criteria:
            raise ValueError(f'env.judge.criteria has no effect with env.judge.kind = "{self.kind}"')
        if self.kind != "criteria" and not self.rubric and self.rubric_file is None:
            raise ValueError("env.judge.url needs env.judge.rubric or env.judge.rubric_file")
        if fixed := [name for name in ("model", "messages", "stream", "n") if name in self.options]:
            raise ValueError(f"env.judge.options cannot contain {fixed[0]!r}, which the judge sets itself")
        return self

    @property
    def limit_s(self) -> float:
        """Longest duration of a verdict that does not queue, with the delays between its calls."""
        return 0.0 if self.url is None else self.attempts * (self.timeout_s + LONGEST_DELAY_S)

    def resolved(self) -> JudgeSettings:
        """Returns the settings with the text of `rubric_file` as `rubric`.

        Raises:
            ConfigError: The file cannot be read or is empty, or the key's variable is not set.
        """
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ConfigError(
                f"env.judge.api_key_env = {self.api_key_env!r}: this environment variable is not set"
            )
        if self.rubric_file is None:
            return self
        try:
            rubric = self.rubric_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"env.judge.rubric_file = {self.rubric_file}: {error}") from None
        if not rubric:
            raise ConfigError(f"env.judge.rubric_file = {self.rubric_file}: the file is empty")
        return self.model_copy(update={"rubric": rubric, "rubric_file": None})

    def shares(self) -> dict[str, float]:
        """Returns the share of each criterion in the mean."""
        total = math.fsum(criterion.weight for criterion in self.criteria.values())
        return {name: criterion.weight / total for name, criterion in self.criteria.items()}


class JudgedEnv(SettingsSection):
    judge: JudgeSettings = JudgeSettings()


class JudgeCommand(SettingsSection):
    """Settings of `tidegate judge`."""

    env: JudgedEnv = JudgedEnv()


LONGEST_DELAY_S = 8.0
"""Longest delay between two calls of a verdict."""
