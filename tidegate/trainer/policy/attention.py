"""Attention in float32 on a GPU: without the flag for grouped heads, which torch's kernels refuse in float32.

transformers sets the flag if there is no attention mask. torch then computes the whole matrix of scores,
whose memory grows with the square of the length: predicted are 98 GB for 6,000 tokens and Qwen3-0.6B.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_of_repeated_heads"


def use_repeated_heads(model: Any) -> None:
    """Have a model repeat keys and values for each query head where it computes attention in float32."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and attention_mask is None and _dtype_of(query) is torch.float32:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # one without groups
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def _dtype_of(query: Tensor) -> torch.dtype:
    """Return the type in which attention is computed: autocast converts float32."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
