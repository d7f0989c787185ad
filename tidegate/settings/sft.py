"""Settings of supervised fine-tuning: `[sft] episodes = ["runs/demo"]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.settings.sections import SettingsSection

SELECTION = ("min_reward", "per_group", "reward_part")


class SFTSettings(SettingsSection):
    episodes: list[Path] = []
    """Recorded episodes: directories of runs, and tables that `tidegate export --parquet` wrote. Their token
    ids and their mask are used as they are."""
    chats: list[Path] = []
    """Chats as JSONL files: `messages`, and `tools` if there are any. They are rendered by the model's chat
    template, and the assistant's tokens are trained on."""
    min_reward: float = 1.0
    """Least reward of a recorded episode that is trained on."""
    per_group: Annotated[int, Field(ge=1)] | None = None
    """Number of recorded episodes of each group, those with the highest rewards; 1 is the best of each group.
    None: all."""
    reward_part: str | None = None
    """Name of the part of the reward that `min_reward` and `per_group` compare, such as that of a judge.
    None: the reward."""
    policy: str | None = None
    """Policy whose sequences and rewards are used, of episodes of several policies. None: they are of one."""
    corrections: bool = False
    """Train on the corrections that users posted for the episodes, instead of on sampled replies."""
    replies: Literal["all", "last"] = "all"
    """Replies of a chat that are trained on."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the tasks whose sequences are not trained on, and give the validation loss. It is measured
    before the first step, every `eval.every` steps and after the last."""
    held_out: bool = False
    """Evaluate the agent on `eval.tasks` held-out tasks of the environment, before the first step and after
    the last."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the training sequences, each in another order."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of optimiser steps, instead of `epochs`."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Sequences of one optimiser step; the last of an epoch may have fewer."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Learning rate of AdamW after the warm-up. The default suits models of a billion parameters; small ones
    need more."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of the learning rate; `linear` and `cosine` fall to a tenth at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a linear warm-up of the learning rate from 0."""

    @model_validator(mode="after")
    def _consistent(self) -> SFTSettings:
        if self.steps is not None and self.other_than_default("epochs"):
            raise ValueError(
                f"steps = {self.steps} and epochs = {self.epochs} both limit the steps: remove one of the two"
            )
        if not self.episodes and (idle := self.other_than_default(*SELECTION, "corrections")):
            raise ValueError(f"{idle[0]} selects recorded episodes, and there are none: set episodes")
        if self.corrections and (idle := self.other_than_default(*SELECTION)):
            raise ValueError(f"{idle[0]} has no effect with corrections = true, which takes every correction")
        if not self.chats and self.other_than_default("replies"):
            raise ValueError("replies is about chats, and there are none: set chats")
        return self
