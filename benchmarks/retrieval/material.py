"""What is searched in the benchmark: 50,000 passages, and questions in other words than their passages."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import numpy as np
import orjson

from tidegate.progress import Progress
from tidegate.rag.build import Plan, build
from tidegate.rag.encoders import HashEncoder
from tidegate.rag.index.searcher import Searcher

DOCUMENTS, DIMENSION, WORDS = 50_000, 384, 30_000
QUESTIONS = Path(__file__).parents[2] / "examples" / "small_agents" / "passages.jsonl"


@functools.cache
def vocabulary(encoder: Path) -> list[str]:
    """At most WORDS words of at least three letters; each is one token of the encoder."""
    tokens = orjson.loads((encoder / "tokenizer.json").read_bytes())["model"]["vocab"]
    return [token for token in tokens if re.fullmatch("[a-z]{3,}", token)][:WORDS]


def queries(encoder: Path, count: int, seed: int) -> list[str]:
    """Different questions of 6 to 14 words: 8 to 16 tokens with the two at the ends."""
    rng, words = random.Random(f"queries {seed}"), vocabulary(encoder)
    return [" ".join(rng.choices(words, k=rng.randint(6, 14))) for _ in range(count)]


def make_index(directory: Path, encoder: Path) -> Path:
    """DOCUMENTS passages with random vectors of length 1, exactly searched."""
    rng, words = random.Random(1), vocabulary(encoder)
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


def recalls(directory: Path, encoder: Path, k: int) -> dict[str, float]:
    """Recall@k by method, of questions that share no word with their passages except function words."""
    rows = [orjson.loads(line) for line in QUESTIONS.read_bytes().splitlines()]
    found = {}
    for name, mode in ((str(encoder), "dense"), (HashEncoder.name, "dense"), (None, "bm25")):
        plan = Plan([QUESTIONS], directory / f"recall-{len(found)}", name, bm25=name is None)
        with Progress() as progress:
            build(plan, progress)
        hits = Searcher(plan.out, threads=1).search([row["question"] for row in rows], [k] * len(rows), mode)
        right = sum(row["id"] in [hit.id for hit in best] for row, best in zip(rows, hits, strict=True))
        found["minilm" if name == str(encoder) else name or mode] = right / len(rows)
    return found
