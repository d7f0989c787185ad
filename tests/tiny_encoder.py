"""Tiny random sentence-transformers models, made at test time without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def make_tiny_encoder(
    directory: Path,
    *,
    hidden: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    prompts: dict[str, str] | None = None,
    similarity: str | None = None,
) -> Any:
    """Saves a character-level model of BERT's shape with mean pooling; returns it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    inside = directory.with_name(directory.name + "-bert")
    _tokenizer().save_pretrained(inside)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=200, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * hidden, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    BertModel(config).to(dtype).save_pretrained(inside)
    body = Transformer(str(inside), max_seq_length=64)
    model = SentenceTransformer(
        modules=[body, Pooling(hidden)], prompts=prompts, similarity_fn_name=similarity, device="cpu"
    )
    model.save(str(directory))
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
