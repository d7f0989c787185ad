"""Settings of distillation: the section `[trainer.teacher]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.settings.sections import HttpUrl, SettingsSection


class TeacherModel(SettingsSection):
    url: HttpUrl | None = None
    """Address of a running engine that serves the teacher: `tidegate engine`, `tidegate vllm` or SGLang."""
    path: Path | None = None
    """Directory of the teacher's model. The run starts an embedded engine for it, with the settings of the
    section `engine`."""
    tokenizer: Path | None = None
    """Directory with the tokenizer of the teacher at `url`, for an engine that reports no `tokenizer_hash`
    (SGLang) and whose files are on another machine."""

    @property
    def given(self) -> bool:
        return self.url is not None or self.path is not None

    @model_validator(mode="after")
    def _one_place(self) -> TeacherModel:
        if self.url is not None and self.path is not None:
            raise ValueError("teacher.url and teacher.path both name a teacher: remove one of the two")
        if self.tokenizer is not None and self.url is None:
            raise ValueError("teacher.tokenizer has no effect without teacher.url")
        return self


class TeacherSettings(TeacherModel):
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the reverse KL divergence from the teacher."""
    form: Literal["advantage", "loss", "distribution"] = "advantage"
    """advantage: weight · (log p_teacher − log p_student) is added to the advantage of each token; loss:
    weight · (log π − log p_teacher)² ÷ 2 is added to its loss; distribution: the divergence over the
    teacher's `top_k` likeliest tokens is added to its loss."""
    top_k: Annotated[int, Field(ge=1)] = 16
    """Number of the teacher's likeliest tokens that the form `distribution` compares."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the advantages that the rewards give; 0: the teacher alone is learned from."""
    hint: str | None = None
    """Text that the teacher alone reads, as a system message before the student's prompt. `{answer}` in it
    stands for the task's gold answer."""
    max_requests: Annotated[int, Field(ge=1)] = 64
    """Requests that one teacher receives at the same time."""
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of one request, after which it is repeated. Failures are repeated for up to
    `trainer.outage_s`."""
    by_env: dict[str, TeacherModel] = {}
    """Teachers of environments, by the environment's name, such as `[trainer.teacher.by_env.arithmetic]` with
    `url` or `path`; the others have the teacher above."""

    @property
    def enabled(self) -> bool:
        return self.given or bool(self.by_env)

    @property
    def asked_top_k(self) -> int:
        """Number of likeliest tokens that a teacher reports."""
        return self.top_k if self.form == "distribution" else 0

    @property
    def alone(self) -> bool:
        """Whether rewards have no weight."""
        return self.enabled and self.reward_weight == 0

    @property
    def models(self) -> dict[str, TeacherModel]:
        """The teachers by environment; the one of all other environments has the name ""."""
        default = {"": TeacherModel(url=self.url, path=self.path, tokenizer=self.tokenizer)}
        return {**(default if self.given else {}), **self.by_env}

    @model_validator(mode="after")
    def _consistent(self) -> TeacherSettings:
        names = [
            name for name in type(self).model_fields if name not in (*TeacherModel.model_fields, "by_env")
        ]
        if not self.enabled and (idle := self.other_than_default(*names)):
            raise ValueError(
                f"teacher.{idle[0]} has no effect without a teacher: set trainer.teacher.url or "
                "trainer.teacher.path, or remove it"
            )
        if self.form != "distribution" and self.other_than_default("top_k"):
            raise ValueError(
                f'teacher.top_k has no effect with teacher.form = "{self.form}": remove it, or set '
                'teacher.form = "distribution"'
            )
        for name, model in self.by_env.items():
            if not (name and model.given):
                raise ValueError(f"teacher.by_env.{name} names no teacher: give it url or path")
        return self
