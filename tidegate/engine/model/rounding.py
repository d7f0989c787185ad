"""Linear layers with weights rounded to few bits: the mismatch of a quantised engine, without its speed.

Rounding is simulated: a copy of each weight is rounded, and products stay in the model's data type. The
engine keeps the published weights, so files, differences and checksums are those of the run. Its logprobs are
those of the rounded weights, which sample.

values          s · round(w ÷ s), integers up to n times s; 32 weights of an output share s = max |w| ÷ n
layers          all linear layers but the output head; embeddings and norms stay as they are
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

GROUP = 32
"""Number of weights of an output that share a scale; all of them if it does not divide their number."""
LARGEST = {"int8": 127, "int4": 7, "five_levels": 2}
"""Largest integer n of each type. Five levels are a stronger mismatch than a 4-bit engine's."""


def use_rounding(hf_model: Any, quantize: str) -> None:
    """Has the linear layers of a model compute with weights rounded to a type of `LARGEST`."""
    head = hf_model.get_output_embeddings()
    layers: list[Any] = [
        one for one in hf_model.modules() if isinstance(one, torch.nn.Linear) and one is not head
    ]
    for layer in layers:
        layer.__class__ = RoundedLinear
        layer.largest = LARGEST[quantize]


class RoundedLinear(torch.nn.Linear):
    """A linear layer that rounds its weight again whenever it has changed."""

    largest: int
    _rounded: Tensor
    _version = -1

    def forward(self, inputs: Tensor) -> Tensor:
        if self._version != self.weight._version:
            self._rounded, self._version = rounded(self.weight.detach(), self.largest), self.weight._version
        return linear(inputs, self._rounded, self.bias)


def rounded(weight: Tensor, steps: int) -> Tensor:
    """Returns a weight [outputs, inputs] with values rounded to multiples of their scale, at most `steps`."""
    size = GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]
    groups = weight.float().view(len(weight), -1, size)
    scale = groups.abs().amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / steps
    found: Tensor = groups.div(scale).round_() * scale
    return found.view_as(weight).to(weight.dtype)
