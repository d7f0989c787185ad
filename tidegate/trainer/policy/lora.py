"""LoRA by `peft`: small matrices beside a model's linear layers are trained, and the model stays as it is.

Outside of the trainer nobody knows: what is written and published is merged, W + (α ÷ r) · B · A under the
base model's names (Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.errors import StartError

BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
"""How peft calls the layer that it wraps, and what it puts beside it: A, to the rank, and B, back."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was put into a model."""

    scaling: float
    """α ÷ r."""

    @classmethod
    def into(cls, model: Any, settings: TrainerSettings) -> Adapter:
        """Put matrices of `lora_rank` beside the layers, and have only them trained.

        A is drawn from torch's generator, B is 0, so that the policy begins as the model. Raises
        StartError where peft is missing, or a target is no linear layer that can be merged.
        """
        try:
            import peft
        except ImportError as error:
            raise StartError(f"trainer.lora_rank needs peft ({error}): install tidegate[lora]") from error
        config = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=settings.lora_targets or "all-linear",
        )
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise StartError(f"trainer.lora_targets: {error}") from error
        _check(model)
        return cls(settings.lora_alpha / settings.lora_rank)

    def parameters(self, model: Any) -> dict[str, Tensor]:
        """What is trained, by its name in the model."""
        return {name: one for name, one in model.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base model's tensors by their names there, from those of the model with the adapter in it.

        In host memory, wherever they were: a GPU rounds the product otherwise, and a checkpoint is held
        against what is merged again, maybe elsewhere.
        """
        found = {}
        for name, one in values.items():
            if name.endswith((DOWN, UP)):
                continue
            layer, inside, which = name.partition(BASE)
            tensor = one.cpu()
            if which == "weight":
                tensor = tensor + self.scaling * (values[layer + UP].cpu() @ values[layer + DOWN].cpu())
            found[f"{layer}.{which}" if inside else name] = tensor
        return found


def layer_of(name: str) -> str:
    """What a parameter is merged with what has the same: a wrapped layer's name, else its own."""
    return name.removesuffix(DOWN).removesuffix(UP).removesuffix(f"{BASE}weight")


def _check(model: Any) -> None:
    """Raises StartError where merging would not give the policy: A and B beside each other's matrix only."""
    named = list(model.named_parameters(remove_duplicate=False))
    for name, one in named:
        if one.requires_grad and not name.endswith((DOWN, UP)):
            raise StartError(f"trainer.lora_targets: {name} is of no linear layer; name linear ones")
    uses = [id(one) for _, one in named]
    for name, one in named:
        if name.endswith(f"{BASE}weight") and uses.count(id(one)) > 1:
            raise StartError(
                f"trainer.lora_targets: {name.removesuffix(f'{BASE}weight')} shares its weight with another "
                "layer, which would be changed with it; leave it out"
            )
