"""The copy of a model with which a GPU computes in bfloat16, while the model itself stays in float32.

The model's parameters are those that the optimiser changes and that checkpoints and published weights hold
(Micikevicius et al., Mixed Precision Training, 2018). Each decoder layer is rounded once a step, where
autocast rounds in every pass and converts between types around every product. Embedding, last norm and head
are shared with the model and stay in float32, as on several ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class WorkingCopy:
    """A copy of a model whose decoder layers are in a shorter type.

    A backward pass through the copy adds the gradients to those of the model's parameters, in float32.

    Args:
        model: The model in float32.
        layers: Returns the decoder layers of a model.
        dtype: Type of the copy's layers.

    Attributes:
        model: The copy.
    """

    def __init__(self, model: Any, layers: Callable[[Any], Sequence[Any]], dtype: torch.dtype) -> None:
        shared = {id(parameter): parameter for parameter in model.parameters()}
        self._exact: list[Tensor] = []
        self._rounded: list[Tensor] = []
        for layer in layers(model):
            for exact in layer.parameters():
                rounded = torch.nn.Parameter(exact.detach().to(dtype), requires_grad=exact.requires_grad)
                if exact.requires_grad:
                    add = partial(_add_gradient, exact)
                    rounded.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
                shared[id(exact)] = rounded
                self._exact.append(exact)
                self._rounded.append(rounded)
        self.model = copy.deepcopy(model, shared)
        for layer in layers(self.model):
            layer.register_forward_pre_hook(partial(_convert_inputs, dtype), with_kwargs=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the model's parameters again, after they have changed."""
        torch._foreach_copy_(self._rounded, self._exact)


def _add_gradient(exact: Tensor, rounded: Tensor) -> None:
    assert rounded.grad is not None
    if exact.grad is None:
        exact.grad = rounded.grad.to(exact.dtype)
    else:
        exact.grad.add_(rounded.grad)
    # Freed at once: else a second gradient of the whole model would be in memory.
    rounded.grad = None


def _convert_inputs(
    dtype: torch.dtype, _: Any, inputs: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert a layer's inputs; a cache is passed as it is, since the layer writes into it."""
    return tuple(_converted(value, dtype) for value in inputs), {
        name: _converted(value, dtype) for name, value in more.items()
    }


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    # Not `isinstance`: a named tuple is not built from an iterable.
    return tuple(_converted(part, dtype) for part in value) if type(value) is tuple else value
