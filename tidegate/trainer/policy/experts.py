"""Experts under autocast, which does not convert the factors of grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "grouped_mm_in_autocast"


def use_autocast(model: Any) -> None:
    """Have a model compute its experts in the type of autocast, if it computes them as grouped products."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # a transformers without grouped products
        return
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in configs.values():
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
            config._experts_implementation = NAME


def experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(module, hidden, index, weights)  # type: ignore[no-any-return]
    dtype = torch.get_autocast_dtype(kind)
    result: Tensor = grouped_mm_experts_forward(_Cast(module, dtype), hidden.to(dtype), index, weights)
    return result.to(hidden.dtype)


class _Cast:
    """A module whose parameters are converted when they are read."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value
