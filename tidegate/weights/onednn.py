"""Linear layers in float32 by oneDNN, on a CPU where that is faster than MKL.

torch multiplies float32 matrices by MKL, which uses AVX2 on AMD's processors, at half the speed of AVX-512.
oneDNN uses AVX-512 there. It reads the weights as they are: nothing is packed, copied or kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

MIN_ROWS = 8
"""Number of rows below which MKL is as fast."""
MIN_WEIGHTS = 2**16
"""Number of weights of a layer below which the call costs more than the product saves."""


def use_onednn(hf_model: Any) -> None:
    """Have the large linear layers of a model in float32 on a CPU compute by oneDNN, if that is faster."""
    if hf_model.device.type != "cpu" or hf_model.dtype is not torch.float32 or not is_faster():
        return
    for module in hf_model.modules():
        if type(module) is torch.nn.Linear and module.weight.numel() >= MIN_WEIGHTS:
            module.__class__ = OneDNNLinear


def is_faster() -> bool:
    """Whether MKL leaves AVX-512 unused on this machine, and torch has oneDNN's product."""
    file = Path("/proc/cpuinfo")
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and file.is_file()
        and "AuthenticAMD" in file.read_text(encoding="utf-8", errors="replace")
    )


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose products, also those of its gradient, are computed by oneDNN."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.numel() < MIN_ROWS * self.in_features:
            return linear(inputs, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return _product(inputs, self.weight, self.bias)
        outputs: Tensor = _Linear.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return outputs


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = of_bias = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_inputs = _product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            of_weight = _product(rows.t(), inputs.flatten(0, -2).t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns inputs · weightᵀ + bias."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product
