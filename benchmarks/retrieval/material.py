"""What is searched in the benchmark: an encoder of MiniLM's shape with random weights, and an index."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import orjson

from tidegate.progress import Progress
from tidegate.rag.build import Plan, build

DOCUMENTS, DIMENSION, WORDS = 50_000, 384, 30_000
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


@functools.cache
def vocabulary() -> list[str]:
    """WORDS different words of two to four syllables; each is one token."""
    rng = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < WORDS:
        found["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4)))] = None
    return list(found)


def queries(count: int, seed: int) -> list[str]:
    """Different questions of 6 to 14 words: 8 to 16 tokens with the two at the ends."""
    rng, words = random.Random(f"queries {seed}"), vocabulary()
    return [" ".join(rng.choices(words, k=rng.randint(6, 14))) for _ in range(count)]


def make_encoder(directory: Path) -> Path:
    """6 layers of 384, 12 heads, mean of the tokens: all-MiniLM-L6's shape. The weights are random."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = {token: n for n, token in enumerate([*special, *vocabulary()])}
    tokenizer = Tokenizer(WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=DIMENSION,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=4 * DIMENSION,
        initializer_range=0.2,  # large enough that texts differ
    )
    BertModel(config).save_pretrained(directory / "bert")
    roles = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(roles, special, strict=True)))
    fast.save_pretrained(directory / "bert")
    transformer = models.Transformer(str(directory / "bert"), max_seq_length=256)
    whole = SentenceTransformer(modules=[transformer, models.Pooling(DIMENSION)], device="cpu")
    whole.save(str(directory / "encoder"))
    return directory / "encoder"


def make_index(directory: Path, encoder: Path) -> Path:
    """DOCUMENTS passages with random vectors of length 1, exactly searched."""
    rng, words = random.Random(1), vocabulary()
    corpus = directory / "corpus.jsonl"
    with corpus.open("wb") as file:
        for n in range(DOCUMENTS):
            title, text = " ".join(rng.choices(words, k=2)), " ".join(rng.choices(words, k=60))
            file.write(orjson.dumps({"id": f"doc-{n}", "title": title, "text": text}) + b"\n")
    plan = Plan([corpus], directory / "index", str(encoder), kind="flat")
    # A build goes on with the shards that it finds: encoding so many passages here would take minutes.
    shards = plan.out / plan.generation([corpus]) / "vectors"
    shards.mkdir(parents=True)
    vectors = np.random.default_rng(1)
    for number, start in enumerate(range(0, DOCUMENTS, plan.shard)):
        shard = vectors.standard_normal((min(plan.shard, DOCUMENTS - start), DIMENSION), np.float32)
        np.save(shards / f"{number:06d}.npy", shard / np.linalg.norm(shard, axis=1, keepdims=True))
    with Progress() as progress:
        build(plan, progress)
    return plan.out
