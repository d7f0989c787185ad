"""Tiny random models, made at test time without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MODELS = {
    "qwen3": Qwen3ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
}


def tiny_config(family: str, vocab: int, layers: int, hidden: int, eos: int | None) -> Any:
    heads = 4
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if family == "qwen3":
        return Qwen3Config(**shape, tie_word_embeddings=True)
    if family == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=False)
    if family == "glm4_moe":
        return Glm4MoeConfig(
            **shape, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=hidden,
            n_shared_experts=1, first_k_dense_replace=1, tie_word_embeddings=False,
        )  # fmt: skip
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        return Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False)
    raise ValueError(f"no tiny model of the family {family!r}")


def make_tiny_model(
    directory: Path,
    vocab: int = 97,
    layers: int = 2,
    hidden: int = 64,
    *,
    family: str = "qwen3",
    seed: int = 0,
    eos: int | None = None,
    spread: float = 0.15,
) -> Any:
    """Saves a random model (`qwen3`, tied; the others, untied) in Hugging Face format; returns it.

    `spread` is the standard deviation of the weights, large enough that the distribution of the next token is
    far from uniform and depends on every earlier token.
    """
    torch.manual_seed(seed)
    config = tiny_config(family, vocab, layers, hidden, eos)
    config.initializer_range = spread
    model = MODELS[family](config).eval()
    model.save_pretrained(directory)
    return model
