"""Settings of a service that trains and samples by the Tinker protocol: the section `[trainer.tinker]`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tidegate.settings.sections import HttpUrl, SettingsSection


class TinkerService(SettingsSection):
    base_model: str = ""
    """Name of the base model at the service, such as `Qwen/Qwen3-8B`; `model.path` has its tokenizer."""
    base_url: HttpUrl | None = None
    """Address of the service. None: the environment variable TINKER_BASE_URL, or the default of the SDK."""
    api_key_file: Path | None = None
    """File with the key of the service. None: the environment variable TINKER_API_KEY."""


class TinkerSettings(TinkerService):
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    """Loss, by its name at the service, which refuses the ones that it does not have."""
    loss_config: dict[str, float] = {}
    """Parameters of the loss at the service, such as `{clip_high_threshold = 1.28}`."""
    reduction: Literal["sum", "mean"] = "sum"
    """How the service adds up the loss: over all tokens, as hosted Tinker does, or as the mean over rows of
    the means over their tokens, as skyrl-tx 0.3 does. Advantages are scaled so that either gives the mean
    over the trained tokens."""
