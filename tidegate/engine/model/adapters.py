"""LoRA adapters that are applied unmerged: x · W + (x · Aᵀ) · s · Bᵀ in a model's linear layers.

The weights of the layers stay those of the base model, in whatever form they are multiplied. Several adapters
are side by side in one pair of matrices, so that rows of different adapters share two products:

    down = [A₁ᵀ | A₂ᵀ | …]  [inputs, columns],  up = [s₁B₁ᵀ ; s₂B₂ᵀ ; …]  [columns, outputs]

Between the products each row keeps the columns of its own adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tidegate.engine.weights.loading import Matrices


class Adapters:
    """The adapters of the live version by name; the name of a single one is ""."""

    def __init__(self) -> None:
        self._matrices: dict[str, Matrices] = {}
        self._own: dict[str, Tensor] = {}
        """Whether a column belongs to the adapter: [columns] each."""
        self._products: dict[torch.nn.Linear, tuple[Tensor, Tensor]] = {}
        self._hooks: list[Any] = []
        self._others: Tensor | None = None
        """Columns that the rows of a pass do not keep, [rows, 1, columns]; None: they keep all."""

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    def replace(self, adapters: Mapping[str, Matrices]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._matrices = {name: matrices for name, matrices in adapters.items() if matrices}
        ranks = [max(down.shape[1] for down, _ in each.values()) for each in self._matrices.values()]
        owners = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks, dtype=torch.long))
        self._own = {name: owners == index for index, name in enumerate(self._matrices)}
        layers = dict.fromkeys(layer for each in self._matrices.values() for layer in each)
        self._products = {layer: self._join(layer, ranks) for layer in layers}
        self._hooks = [layer.register_forward_hook(self._add) for layer in layers]
        self._others = None

    def select(self, rows: Sequence[str], device: torch.device) -> None:
        """Set the adapters of the rows of the next pass; among names, a row without one has none."""
        if "" not in self._matrices and self._matrices:
            none = torch.zeros_like(next(iter(self._own.values())))
            own = torch.stack([self._own[name] if name else none for name in rows])
            self._others = ~own[:, None].to(device)

    def _join(self, layer: torch.nn.Linear, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns `down` and `up` of a layer, with zeros for an adapter without matrices, or of less rank."""
        weight = layer.weight
        none = weight.new_zeros(layer.in_features, 0), weight.new_zeros(0, layer.out_features)
        pairs = [each.get(layer, none) for each in self._matrices.values()]
        downs = [pad(down, (0, rank - down.shape[1])) for (down, _), rank in zip(pairs, ranks, strict=True)]
        ups = [pad(up, (0, 0, 0, rank - len(up))) for (_, up), rank in zip(pairs, ranks, strict=True)]
        return torch.cat(downs, 1), torch.cat(ups)

    def _add(self, layer: torch.nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        down, up = self._products[layer]
        between = inputs[0] @ down
        if self._others is not None:
            between = between.view(len(self._others), -1, len(up)).masked_fill(self._others, 0)
        between, up = between.to(output.dtype).flatten(0, -2), up.to(output.dtype)  # a head's may be longer
        output.view(-1, output.shape[-1]).addmm_(between, up)
