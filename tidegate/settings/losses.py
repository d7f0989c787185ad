"""Settings of the losses, one class for each: `[trainer.loss] name = "dapo"` and what applies to it.

The formula of each is at the function of its name in `trainer.losses.built_in`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from tidegate.settings.sections import SettingsSection

Cap = Annotated[float, Field(gt=0, description="Cap C on π/μ.")]
Level = Annotated[
    Literal["token", "sequence"],
    Field(description="Whether each token has its own ratio π/μ, or that of its sequence."),
]
Low = Annotated[float, Field(ge=0, le=1, description="Clipping range of the ratio below 1.")]
High = Annotated[float, Field(gt=0, description="Clipping range of the ratio above 1.")]
SequenceMask = Annotated[
    Annotated[float, Field(ge=0)] | None,
    Field(
        description="Mean log μ/π of a sequence above which its tokens with a negative advantage are not "
        "trained on (off-policy sequence masking). None: no sequence is masked."
    ),
]

MAX_LISTED = 1024
"""Limit of `score_centering`: SGLang fails on more ids than its vocabulary has."""
AUTO_LISTED = 32
"""Number of ids that `score_centering = "auto"` stands for, where it is on."""
Centering = Annotated[
    Annotated[int, Field(ge=0, le=MAX_LISTED)] | Literal["auto"],
    Field(
        description="Score centering with this number of the engine's likeliest ids in place of each token, "
        "such as 32, which the engine then reports (docs/losses.md). auto: 32 if tokens may be sampled from "
        "other weights than the trainer's and the loss does not clip by the sign of the advantage, "
        "0 otherwise. 0: none."
    ),
]


class LossSettings(SettingsSection):
    """Settings that a loss has beside its name."""

    name: str
    """Name of the loss (docs/losses.md)."""
    advantage_scale: ClassVar[str] = "group"
    """The loss's default for `trainer.advantage_scale`."""
    several_steps: ClassVar[bool] = False
    """Whether the loss allows several optimiser steps per batch: it is relative to a recomputed π_old."""

    clips_by_sign: ClassVar[bool] = False
    """Whether the loss clips by the sign of the advantage, and is made worse by score centering."""

    @property
    def auto_listed(self) -> int:
        """Number of ids that `score_centering = "auto"` stands for off policy."""
        return 0 if self.clips_by_sign or "score_centering" not in type(self).model_fields else AUTO_LISTED

    @property
    def listed_ids(self) -> int:
        """Number of likeliest ids that engines report in place of each token."""
        listed: int | str = getattr(self, "score_centering", 0)
        return self.auto_listed if listed == "auto" else int(listed)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.listed_ids and getattr(self, "level", "token") == "sequence":
            raise ValueError(
                f'score_centering = {self.listed_ids} needs level = "token": the ratio of a sequence is that '
                "of the tokens that were sampled, and other ids have none; remove one of the two"
            )
        return self


class TruncatedISLoss(LossSettings):
    name: Literal["truncated_is"] = "truncated_is"
    importance_cap: Cap = 2.0
    level: Level = "token"
    score_centering: Centering = 0


class MaskedISLoss(LossSettings):
    name: Literal["masked_is"] = "masked_is"
    importance_cap: Cap = 2.0
    level: Level = "token"
    score_centering: Centering = 0


class CISPOLoss(LossSettings):
    name: Literal["cispo"] = "cispo"
    clip_low: Low = 1.0
    clip_high: High = 4.0
    score_centering: Centering = 0


class ClippedLoss(LossSettings):
    """Settings of the losses with PPO's clipping of π/μ."""

    clips_by_sign: ClassVar[bool] = True
    clip_low: Low = 0.2
    clip_high: High = 0.2
    sequence_mask: SequenceMask = None
    score_centering: Centering = 0


class GRPOLoss(ClippedLoss):
    name: Literal["grpo"] = "grpo"


class DrGRPOLoss(ClippedLoss):
    advantage_scale: ClassVar[str] = "none"
    name: Literal["dr_grpo"] = "dr_grpo"
    sequence_length: Annotated[int, Field(ge=1)] = 1024
    """Constant divisor, in tokens per trajectory."""


class DAPOLoss(ClippedLoss):
    name: Literal["dapo"] = "dapo"
    clip_high: High = 0.28
    dual_clip: Annotated[float, Field(gt=1)] = 10.0
    """Upper bound c of the ratio of tokens with a negative advantage (dual clipping)."""


class GSPOLoss(LossSettings):
    name: Literal["gspo"] = "gspo"
    clip_low: Low = 3e-4
    clip_high: High = 4e-4


class DecoupledPPOLoss(LossSettings):
    several_steps: ClassVar[bool] = True
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    importance_cap: Cap = 2.0
    """Cap C on π_old/μ."""
    clip_low: Low = 0.2
    clip_high: High = 0.2


class DPPOLoss(LossSettings):
    clips_by_sign: ClassVar[bool] = True
    name: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "kl"
    """Divergence of π from μ at each token: total variation or KL, of the token against all others."""
    threshold: Annotated[float, Field(gt=0)] | None = None
    """Divergence δ above which a token is not moved further from μ. None: 0.15 for tv, 0.05 for kl."""
    importance_cap: Cap = 20.0
    score_centering: Centering = 0


class CustomLoss(LossSettings):
    name: Literal["custom"] = "custom"
    use: str
    """A function of your own that returns a `Loss`, as `file.py:function` (docs/losses.md)."""
    options: dict[str, Any] = {}
    """Arguments of this function."""


class NLLLoss(LossSettings):
    """The loss of supervised fine-tuning, which no run chooses: it ignores rewards."""

    name: Literal["nll"] = "nll"


KINDS: tuple[type[LossSettings], ...] = (
    TruncatedISLoss, MaskedISLoss, CISPOLoss, GRPOLoss, DrGRPOLoss, DAPOLoss, GSPOLoss, DecoupledPPOLoss,
    DPPOLoss, CustomLoss,
)  # fmt: skip
BY_NAME: dict[str, type[LossSettings]] = {kind.model_fields["name"].default: kind for kind in KINDS}
SEVERAL_STEPS = [name for name, kind in BY_NAME.items() if kind.several_steps]


def _name_of(value: Any) -> str:
    if isinstance(value, LossSettings):
        return value.name
    return str(value.get("name", "custom" if "use" in value else "dppo"))


def _nearest(name: str) -> str:
    return difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.0)[0]


def _check(value: Any) -> Any:
    """Raises ValueError for an unknown loss, and for a setting that the named loss does not have."""
    if isinstance(value, str):
        raise ValueError(
            f'the loss is a section: write [trainer.loss] with name = "{_nearest(value)}", '
            "or --trainer.loss.name"
        )
    if not isinstance(value, dict):
        return value
    name = _name_of(value)
    if name not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise ValueError(f"there is no loss {name!r}; did you mean {_nearest(name)!r}? Known: {known}")
    fields = BY_NAME[name].model_fields
    for key in value:
        if key not in fields and any(key in kind.model_fields for kind in KINDS):
            applies = [other for other, kind in BY_NAME.items() if key in kind.model_fields]
            raise ValueError(f"{key} does not apply to name = {name!r}, only to {', '.join(applies)}")
    return value


if TYPE_CHECKING:
    AnyLoss: TypeAlias = LossSettings
else:
    # The tags have brackets, by which messages leave them out of a setting's dotted key.
    AnyLoss = Annotated[
        Union[tuple(Annotated[kind, Tag(f"[{name}]")] for name, kind in BY_NAME.items())],  # noqa: UP007
        Discriminator(lambda value: f"[{_name_of(value)}]"),
        BeforeValidator(_check),
    ]
