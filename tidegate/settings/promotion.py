"""Settings of the promotion of published versions: `[trainer.promotion] mode = "canary"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.settings.sections import SettingsSection

CANARY_ONLY = ("share", "max_wait_s")


class PromotionSettings(SettingsSection):
    mode: Literal["always", "evaluated", "canary"] = "always"
    """When a version goes live. always: at once. evaluated: if its held-out reward is not lower than that of
    the live version by more than `margin`. canary: if a sequential test on the rewards of clients'
    conversations shows that. Otherwise the policy and its optimiser are restored from the live
    version."""
    margin: Annotated[float, Field(gt=0)] = 0.1
    """How much lower a candidate's mean reward may be."""
    engines: Annotated[int, Field(ge=1)] = 1
    """Engines that serve the candidate; the others serve the live version."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the new conversations that sample from the candidate."""
    max_wait_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of the test; a candidate without a result by then is rolled back."""

    @model_validator(mode="after")
    def _consistent(self) -> PromotionSettings:
        if self.mode != "canary" and (idle := self.other_than_default(*CANARY_ONLY)):
            raise ValueError(f'{idle[0]} is for mode = "canary"; it has no effect with "{self.mode}"')
        if self.mode == "always" and (idle := self.other_than_default("margin", "engines")):
            raise ValueError(f'{idle[0]} has no effect with mode = "always", which tests no version')
        return self
