"""LoRA by `peft`: trains low-rank matrices beside a model's frozen linear layers.

Written weights are merged, W + (α ÷ r) · B · A under the base model's names (Hu et al., LoRA: Low-Rank
Adaptation of Large Language Models, 2021). Published ones are too, unless `trainer.lora.publish` = "adapter":
then A and B are written in peft's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tidegate.config import LoRASettings
from tidegate.errors import StartError
from tidegate.program import advise_extra
from tidegate.weights import adapter_files, checksum
from tidegate.weights.files import replacing

BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
"""peft's names for the wrapped layer and for the matrices A (down to the rank) and B (up again)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA matrices in a model."""

    scaling: float
    """α ÷ r."""
    config: Any
    """peft's config."""

    @classmethod
    def inject(cls, model: Any, settings: LoRASettings) -> Adapter:
        """Add matrices of `rank` to the model and freeze the other parameters.

        A is drawn from torch's generator and B is 0, so that the initial policy equals the model.

        Raises:
            StartError: if peft is missing, or a target is not a linear layer that can be merged.
        """
        try:
            import peft
        except ImportError as error:
            raise StartError(f"trainer.lora.rank needs peft ({error}): {advise_extra('lora')}") from error
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=_linear_layers(model, settings.targets),
        )
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise StartError(f"trainer.lora.targets: {error}") from error
        _check_mergeable(model)
        return cls(settings.alpha / settings.rank, config)

    def parameters(self, model: Any) -> dict[str, Tensor]:
        """Return the trainable parameters by name."""
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def write(self, directory: Path, values: Mapping[str, Tensor], base: Path) -> None:
        """Write the matrices in peft's format, with a checksum of them and of the base model's files.

        Replaces `directory` when it is complete. Raises OSError.
        """
        tensors = {
            adapter_files.PREFIX + name.replace(".default.weight", ".weight"): value.cpu().contiguous()
            for name, value in values.items()
        }
        metadata = {"format": "pt", adapter_files.BASE_CHECKSUM: str(_checksum_of(base))}
        self.config.base_model_name_or_path, self.config.task_type = str(base), "CAUSAL_LM"
        with replacing(directory) as partial:
            self.config.save_pretrained(partial)
            (partial / adapter_files.FILE).write_bytes(save(tensors, metadata))
            checksum.write(partial)

    @torch.no_grad()
    def merged(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge the adapter: return the base model's tensors under their original names.

        Merges in host memory: a GPU rounds differently, and checkpoints are compared with weights that may be
        merged on another device.
        """
        result = {}
        for name, value in values.items():
            if is_adapter(name):
                continue
            layer, wrapped, part = name.partition(BASE)
            tensor = value.cpu()
            if part == "weight":
                tensor = tensor + self.scaling * (values[layer + UP].cpu() @ values[layer + DOWN].cpu())
            result[f"{layer}.{part}" if wrapped else name] = tensor
        return result


@cache
def _checksum_of(base: Path) -> int:
    # Once a process: the base does not change during a run, and may have many gigabytes.
    return checksum.of_files(base)


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def base_name(name: str) -> str:
    """Return the base model's name of a parameter: of an adapter's matrix, the weight that it changes."""
    if is_adapter(name):
        return name.removesuffix(DOWN).removesuffix(UP) + ".weight"
    return name.replace(BASE, ".")


def _linear_layers(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the full names of the linear layers that get an adapter.

    By the ends of names, peft would also adapt experts of one tensor, whose adapters are not merged.
    """
    head = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    if not targets:
        return [name for name, layer in layers.items() if layer is not head]
    found = {end: [name for name in layers if f".{name}".endswith(f".{end}")] for end in targets}
    if missing := [end for end, names in found.items() if not names]:
        ends = sorted({name.rpartition(".")[2] for name in layers})
        raise StartError(
            f"trainer.lora.targets: the model has no linear layer {', '.join(map(repr, missing))}; it has "
            f"{', '.join(ends)}"
        )
    return sorted({name for names in found.values() for name in names})


def _check_mergeable(model: Any) -> None:
    """Raises StartError unless merging gives the policy: only unshared linear layers can be merged."""
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if parameter.requires_grad and not is_adapter(name):
            raise StartError(
                f"trainer.lora.targets: {name} does not belong to a linear layer; name linear layers only"
            )
    uses = [id(parameter) for _, parameter in named]
    for name, parameter in named:
        if name.endswith(f"{BASE}weight") and uses.count(id(parameter)) > 1:
            raise StartError(
                f"trainer.lora.targets: {name.removesuffix(f'{BASE}weight')} shares its weight with another "
                "layer, which merging would change too; leave it out"
            )
