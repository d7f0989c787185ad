"""The dimensions of a decoder, read from config.json, and the memory that they determine.

With P parameters, L layers, h hidden, i intermediate, H and K attention and key-value heads, d the size
of a head, V the vocabulary, and b bytes a number (float32: 4, bfloat16: 2):

- key-value cache: slots · context · L · K · d · 2 · b (keys and values). It grows to this on demand.
- passes: in a prefill pass (4h + 3i) · b a token, freed after each layer.
- activations kept for the backward pass, a microbatch token and layer, in float32 (pre-norm decoder with a
  gated MLP; counted from what PyTorch keeps): 6h for norms and residuals, 6Hd + 2Kd for queries, keys,
  values and their normalised forms, 4i for the MLP. An estimate, and an upper one where prefixes are
  shared. In bfloat16 by autocast, norms and residuals stay in float32: 0.7 of that, counted likewise. On a
  GPU whole layers are in bfloat16, except inside norms: in bytes 16h + 14Hd + 14Kd + 8i. Either way 2 · P
  is added for the weights in that type. In float32 on a GPU 2Hd more, if H > K: keys and values are
  repeated for each query head, as torch's kernels take grouped heads in bfloat16 only. No kernel in use
  keeps the matrix of scores. In a layer with experts, 4e + 2h for each expert that computes the token,
  with its intermediate size e, in place of 4i. With activation checkpointing h a token and layer is kept,
  besides one whole layer.
- logits: of `microbatch_tokens` tokens, at most 2^26 numbers at once, three times (logits, softmax,
  gradient) in float32; on a GPU 2^28, twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.weights.files import stored_parameters

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
IN_BFLOAT16 = 0.7
"""Size of activations computed in bfloat16, relative to float32."""
LOGITS_AT_ONCE, LOGITS_AT_ONCE_ON_GPU = 2**26, 2**28
"""Maximum logits computed at once, as in the trainer."""
# From the config.json that Qwen publishes with each, so that a plan can be made before a download.
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "model_type": "qwen3"}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-4b": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {**_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                      "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                      "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                      "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder that determine its memory."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    _: KW_ONLY
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    """Experts of a sparse layer; 0 in a dense model."""
    chosen: int = 0
    """Experts that compute a token."""
    expert_size: int = 0
    """Intermediate size of an expert."""
    shared_size: int = 0
    """Intermediate size of the expert that computes every token, with its gate; 0: none."""
    sparse_layers: int = 0
    source: str = ""
    """File or model name from which the shape was read."""
    stored: int | None = None
    """Number of parameters by the weights' headers; None if there are no weights."""

    @property
    def parameters(self) -> int:
        """Number of parameters by the weights' headers, else by the shape (Llama, Qwen2, Qwen3, MoE)."""
        return self.stored if self.stored is not None else self.counted

    @property
    def counted(self) -> int:
        """Embeddings, attention, gated MLP or experts with their router, and norms by the shape."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key)
        attention += (query + 2 * key) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        mlps = (self.layers - self.sparse_layers) * 3 * self.hidden * self.intermediate
        sparse = self.experts * (3 * self.expert_size + 1) + 3 * self.shared_size + (self.shared_size > 0)
        mlps += self.sparse_layers * self.hidden * sparse
        layers = self.layers * (attention + 2 * self.hidden) + mlps
        return self.vocab * self.hidden * (1 if self.tied else 2) + layers + self.hidden

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Returns the number of LoRA parameters of the `targets` (names as in Llama and Qwen; none: all)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {
            "q_proj": self.hidden + query, "k_proj": self.hidden + key, "v_proj": self.hidden + key,
            "o_proj": query + self.hidden, "gate_proj": self.hidden + self.intermediate,
            "up_proj": self.hidden + self.intermediate, "down_proj": self.intermediate + self.hidden,
        }  # fmt: skip
        chosen = {name: size for name, size in ends.items() if not targets or name in targets}
        mlp = sum(chosen.pop(name, 0) for name in ("gate_proj", "up_proj", "down_proj"))
        head = self.hidden + self.vocab if "lm_head" in targets else 0
        dense = self.layers - self.sparse_layers  # experts of one tensor get no adapter
        return rank * (self.layers * sum(chosen.values()) + dense * mlp + head)

    def kv_bytes(self, slots: int, context: int, dtype: str) -> int:
        return slots * context * self.layers * self.kv_heads * self.head_dim * 2 * BYTES[dtype]

    def pass_bytes(self, tokens: int, dtype: str) -> int:
        """Returns the bytes of one layer's values in a pass without gradient."""
        return tokens * (4 * self.hidden + 3 * self.intermediate) * BYTES[dtype]

    def activation_bytes(
        self, tokens: int, dtype: str = "float32", *, recomputed: bool = False, on_gpu: bool = False
    ) -> int:
        """Returns the bytes kept for the backward pass of one microbatch."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sparse = self.sparse_layers / self.layers
        experts = self.chosen * (4 * self.expert_size + 2 * self.hidden) + 4 * self.shared_size
        layer = 6 * self.hidden + 6 * query + 2 * key
        layer += int(4 * self.intermediate * (1 - sparse) + experts * sparse)
        if on_gpu and dtype == "float32" and self.heads > self.kv_heads:
            layer += 2 * query  # keys and values repeated for each query head
        size, inputs = layer * FLOAT32, self.hidden * FLOAT32
        if dtype == "bfloat16" and on_gpu:
            mlp = int(8 * self.intermediate * (1 - sparse) + 2 * experts * sparse)
            size, inputs = 16 * self.hidden + 14 * query + 14 * key + mlp, 2 * self.hidden
        elif dtype == "bfloat16":
            size = int(IN_BFLOAT16 * size)
        return tokens * (self.layers * inputs + size if recomputed else self.layers * size)

    def gathered_bytes(self, dtype: str) -> int:
        """Returns the bytes of what several ranks gather at a time: embedding and head in float32 with their
        gradients, and two layers."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        return 2 * FLOAT32 * ends + 2 * BYTES[dtype] * (self.parameters - ends) // self.layers

    def logit_bytes(self, tokens: int, *, on_gpu: bool = False) -> int:
        most, copies = (LOGITS_AT_ONCE_ON_GPU, 2) if on_gpu else (LOGITS_AT_ONCE, 3)
        return copies * min(tokens * self.vocab, most) * FLOAT32


def read_shape(model: Path) -> Shape:
    """Returns the shape by a model directory's config.json, else that of a published model of this name.

    Raises ConfigError if there is neither, or if the config is not that of a dense decoder.
    """
    file = model / "config.json"
    if file.is_file():
        return _shape(_read_json(file), str(file), stored_parameters(model))
    known = PUBLISHED.get(model.name.lower())
    if known is None:
        raise ConfigError(
            f"no memory plan: {file} does not exist, and {model.name} is none of the known models "
            f"{', '.join(PUBLISHED)}"
        )
    return _shape(known, f"the published {model.name}")


def _shape(config: Mapping[str, Any], source: str, stored: int | None = None) -> Shape:
    text = config.get("text_config") or config
    family = str(text.get("model_type", ""))
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return Shape(
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(text["intermediate_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            vocab=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=family == "qwen2" or bool(text.get("attention_bias")),
            source=source,
            stored=stored,
            **_experts(text),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{source}: no memory plan, because the config of a plain decoder is expected: {error.args[0]!r}"
        ) from None


def _experts(text: Mapping[str, Any]) -> dict[str, int]:
    """Returns `Shape`'s fields of experts, by the names of Qwen, Mixtral or DeepSeek; none if dense."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    if not experts:
        return {}
    size = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("shared_expert_intermediate_size") or size * int(text.get("n_shared_experts") or 0))
    step, first = int(text.get("decoder_sparse_step") or 1), int(text.get("first_k_dense_replace") or 0)
    dense = set(text.get("mlp_only_layers") or ()).union(range(first))
    layers = range(int(text["num_hidden_layers"]))
    return {
        "experts": experts,
        "chosen": int(text["num_experts_per_tok"]),
        "expert_size": size,
        "shared_size": shared,
        "sparse_layers": sum(layer not in dense and (layer + 1) % step == 0 for layer in layers),
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return value
