"""Makes the search demo's base model: `python -m examples.search_base.make --out DIR` (a minute and a half).

A Qwen3-shaped model of under a million parameters with its own tokenizer. It is trained on demonstrations of
the search agent in worlds of random names, many of them deliberately wrong. The model therefore knows how to
search, to copy a name and to state an answer, but not how many hops a question needs: that is left to
reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.bases.names import SYLLABLES, held_out_name
from examples.demo_search.synthetic_world import FACTS, KINDS, QUERIES, Fact, Kind

SEED = 17
BATCH = 32
STAGES = (("calls", 40), ("turns", 70), ("episodes", 90))
"""Training stages with their steps: first calls alone, single turns, whole episodes."""
VOCABULARY = 1000

MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
# A name is always two tokens, its syllables, because the first never includes a space; other words include
# their leading space. Each key of a tool call is one piece.
_FIRST = "|".join(syllable.capitalize() for syllable in SYLLABLES)
_SECOND = "|".join(SYLLABLES)
PATTERN = (
    rf"(?:{_FIRST})(?=(?:{_SECOND})(?![a-z]))|(?<=[A-Z][a-z][a-z])(?:{_SECOND})(?![a-z])"
    r'|\{?"?[a-z]+"[:,] [{"]*'
    rf"| ?(?!(?:{_FIRST})(?:{_SECOND})(?![a-z]))[A-Za-z]+|[0-9]|[^A-Za-z0-9\s]+|\s"
)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "search", "parameters": {"properties": {"query": {"type": "string"}}}},
    }
]
HOPS = {1: 0.15, 2: 0.75, 3: 0.10}
"""Share of demonstrated questions by number of hops."""
TOO_EARLY, TOO_FAR, ONLY_EARLY = 0.34, 0.35, 0.70
"""Shares of demonstrations that stop one hop early, or go one hop too far. Where the facts end with the
question, none can go too far, and more of them stop early."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=MARKERS, vocabulary=VOCABULARY)


def _words() -> Iterator[str]:
    """Text of this world: passages, queries, questions, and the agent's fixed text."""
    rng = random.Random(SEED)
    for _ in range(4000):
        name, other = draw_name(rng), draw_name(rng)
        yield rng.choice(list(FACTS.values())).format(subject=name, object=other)
        yield rng.choice(list(QUERIES.values())).format(subject=name)
        yield rng.choice(KINDS).text.format(name)
        yield from ('{"name": "search", "arguments": {"query": "', '"}}')
        yield "system\ntools: search(query)\nuser\nassistant\nerror: the query is empty"


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=3, init_std=0.06)


def draw_name(rng: random.Random) -> str:
    """A name that occurs in no held-out world."""
    while True:
        first, second = rng.sample(SYLLABLES, 2)
        if not held_out_name(first.capitalize() + second):
            return first.capitalize() + second


def draw_facts(rng: random.Random) -> list[Fact]:
    """Facts of a random world: a person's employer, its seat, and that city's mayor."""
    names = [draw_name(rng) for _ in range(4)]
    return [Fact("", relation, names[n], names[n + 1]) for n, relation in enumerate(FACTS)]


def demonstrated_facts(kind: Kind, facts: list[Fact], rng: random.Random) -> list[Fact]:
    """The facts that a demonstration looks up: the right number, one too many, or one too few."""
    first = list(FACTS).index(kind.path[0])
    depth, drawn = len(kind.path), rng.random()
    if first + depth == len(facts):
        depth -= depth > 1 and drawn < ONLY_EARLY
    elif drawn < TOO_FAR:
        depth += 1
    elif drawn < TOO_FAR + TOO_EARLY:
        depth = max(1, depth - 1)
    return facts[first : first + depth]


def demonstration(question: str, facts: list[Fact]) -> list[dict[str, Any]]:
    """An episode of the search agent: the question, a search for each fact, the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for fact in facts:
        function = {"name": "search", "arguments": {"query": fact.query}}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": fact.text})
    messages.append({"role": "assistant", "content": f"<answer>{facts[-1].object}</answer>"})
    return messages


def demonstrations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields demonstrations without end."""
    while True:
        hops = rng.choices(list(HOPS), list(HOPS.values()))[0]
        kind = rng.choice([kind for kind in KINDS if len(kind.path) == hops])
        facts = draw_facts(rng)
        start = facts[list(FACTS).index(kind.path[0])].subject
        yield demonstration(kind.text.format(start), demonstrated_facts(kind, facts, rng))


def fragment(messages: list[dict[str, Any]], stage: str, rng: random.Random) -> list[dict[str, Any]]:
    """The part of an episode that a stage trains on."""
    if stage == "calls":
        return messages[:2]
    if stage == "turns":
        turn = rng.randrange(1, len(messages), 2)
        return [messages[0], *messages[max(1, turn - 2) : turn + 1]]
    return messages


def batches(tokenizer: PreTrainedTokenizerFast, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels), each [BATCH, length]."""
    rng = random.Random(SEED)
    stream = demonstrations(rng)
    for stage, steps in STAGES:
        for _ in range(round(steps * scale)):
            parts = [fragment(next(stream), stage, rng) for _ in range(BATCH)]
            rows = [recipe.encode(tokenizer, part, TOOLS, last_only=stage != "episodes") for part in parts]
            yield recipe.padded(rows, tokenizer.pad_token_id)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, scale: float = 1.0) -> None:
    """Trains all stages, each for `scale` times its steps."""
    recipe.fit(
        model,
        batches(tokenizer, scale),
        recipe.muon_and_adamw(model),
        steps=sum(round(count * scale) for _, count in STAGES),
        decay=recipe.decay_in_second_half,
        log_every=20,
    )


if __name__ == "__main__":
    recipe.main(str(__doc__), make_tokenizer, make_model, train)
