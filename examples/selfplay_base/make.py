"""Makes the base model of the self-play demo: `python -m examples.selfplay_base.make --out DIR` (minutes, one
thread).

A Qwen3-shaped model of less than a million parameters. It is trained on games of Nim in which both players
choose among the legal moves at random: it knows the rules, and plays no better than chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.selfplay.env import STARTS, Match, Nim

SEED = 38
STEPS = 300
BATCH = 32
VOCABULARY = 512
PATTERN = r"\n  pile |[0-9]| ?[A-Za-z]+|[^A-Za-z0-9\s]+ ?|\s+"
"""Each digit is one piece; a word and the beginning of a pile's line are one each."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=(), vocabulary=VOCABULARY)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=3, init_std=0.05)


def _words() -> Iterator[str]:
    for chat in itertools.islice(games(random.Random(SEED)), 400):
        yield from (message["content"] for message in chat)
        yield "system\nuser\nassistant"


def random_move(match: Match, rng: random.Random) -> str:
    moves = [f"[{pile} {taken + 1}]" for pile, size in enumerate(match.piles) for taken in range(size)]
    return rng.choice(moves)


def games(rng: random.Random) -> Iterator[list[recipe.Message]]:
    """Yields, without end, the chats of both players of random games."""
    nim = Nim()
    while True:
        match = nim.match({"piles": rng.choice(STARTS), "policies": ["first", "second"]})
        chats: dict[str, list[recipe.Message]] = {"first": [], "second": []}
        over = False
        while not over:
            observed = match.observation()
            move = random_move(match, rng)
            chats[observed["policy"]] += [
                {"role": "user", "content": observed["content"]}, {"role": "assistant", "content": move},
            ]  # fmt: skip
            over = match.move(move)
        yield from (chat for chat in chats.values() if chat)


def batches(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of (ids, labels), each [BATCH, length]."""
    chats = games(random.Random(SEED))
    for _ in range(steps):
        rows = [recipe.encode(tokenizer, next(chats), []) for _ in range(BATCH)]
        yield recipe.padded(rows, tokenizer.pad_token_id)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, scale: float) -> None:
    steps = round(STEPS * scale)
    recipe.fit(
        model,
        batches(tokenizer, steps),
        recipe.muon_and_adamw(model),
        steps=steps,
        decay=recipe.decay_in_second_half,
        log_every=50,
    )


if __name__ == "__main__":
    recipe.main(__doc__, make_tokenizer, make_model, train)
