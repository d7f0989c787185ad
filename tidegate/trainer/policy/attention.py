"""Attention on a GPU, in forms that torch's fused kernels take.

- In float32 without the flag for grouped heads, which transformers sets if there is no attention mask and
  these kernels refuse. torch then computes the whole matrix of scores, whose memory grows with the square of
  the length: predicted are 98 GB for 6,000 tokens and Qwen3-0.6B.
- After a shared prefix without a mask: torch converts a boolean one to numbers in every layer, and each layer
  keeps them for its backward pass (predicted are 49 GB for a row of 32,000 tokens after a prompt of 6,000).
  Rows with prefixes of one length need none: a token sees all tokens before it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "sdpa_of_gpu_kernels"


def use_gpu_kernels(model: Any) -> None:
    """Have a model compute attention in forms that the fused kernels of a GPU take."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def mask(*, mask_function: Any, attention_mask: Tensor | None, **options: Any) -> Tensor | None:
    """Return None where a token sees all tokens before it, also those of a cache."""
    if mask_function is causal_mask_function and attention_mask is None:
        return None
    whole: Tensor | None = sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options)
    return whole


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    # Under autocast RoPE leaves query and key in float32 beside a value in bfloat16. Autocast would convert
    # them, but a causal bias is checked for equal types before it.
    dtype = _dtype_of(query)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and attention_mask is None and dtype is torch.float32:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # one without groups
    if attention_mask is None and query.shape[2] < key.shape[2]:
        continued = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, causal_lower_right(query.shape[2], key.shape[2]),
            scale=options.get("scaling"), enable_gqa=query.shape[1] > key.shape[1],
        )  # fmt: skip
        return continued.transpose(1, 2).contiguous(), None
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def _dtype_of(query: Tensor) -> torch.dtype:
    """Return the type in which attention is computed: autocast converts float32."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
