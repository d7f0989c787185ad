"""Logits in float32 from a head whose products are computed in a shorter type.

Logits in bfloat16 are rounded to steps of 0.06 near 10: logprobs are then wrong by 0.01 on average. The sums
of the products are computed in float32 in any case; here they are kept so. So is the gradient of the weight,
to which pieces of a batch add.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def float_logits(hidden_nd: Tensor, weight_vd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden · weightᵀ as float32 [n, v], with both rounded to `dtype`."""
    logits: Tensor = _FloatLogits.apply(hidden_nd, weight_vd, dtype)  # type: ignore[no-untyped-call]
    return logits


def is_plain(head: Any) -> bool:
    """Whether a head only multiplies by its weight."""
    return type(head) is torch.nn.Linear and getattr(head, "bias", None) is None


def use_float_logits(hf_model: Any) -> None:
    """Have a causal LM in a shorter type than float32 return float32 logits, if its head is a matrix."""
    head = hf_model.get_output_embeddings()
    if hf_model.dtype is not torch.float32 and is_plain(head):

        def forward(hidden: Tensor) -> Tensor:
            logits = float_logits(hidden.flatten(0, -2), head.weight, head.weight.dtype)
            return logits.reshape(*hidden.shape[:-1], -1)

        head.forward = forward


class _FloatLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden_nd, weight_vd)
        ctx.dtype = dtype
        return product(hidden_nd.to(dtype), weight_vd.to(dtype).t())

    @staticmethod
    def backward(ctx: Any, gradient_nv: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_nd, weight_vd = ctx.saved_tensors
        gradient_nv = gradient_nv.to(ctx.dtype)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = product(gradient_nv, weight_vd.to(ctx.dtype)).to(hidden_nd.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = product(gradient_nv.t(), hidden_nd.to(ctx.dtype)).to(weight_vd.dtype)
        return of_hidden, of_weight, None


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left · right in float32, whose sums are not rounded to the factors' type."""
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()
