"""Make the search demo's base model: `python examples/search_base/make.py --out DIR` (a minute and a half).

A Qwen3-shaped model of under a million parameters with a tokenizer of its own. It is cold-started on
demonstrations of the search agent at work in worlds of random names, which are deliberately often wrong:
so it knows how to search, how to copy a name and how to state an answer, but not how far a question goes.
That is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tidegate.envs.search_world import FACTS, KINDS, QUERIES, SYLLABLES, Fact, Kind, held_out_name

SEED = 17
BATCH = 32
STAGES = (("calls", 40), ("turns", 70), ("episodes", 90))
"""What is learned from, and for how many steps: first calls alone, single turns, whole episodes."""
MATRIX_RATE = 0.02  # Muon's
OTHER_RATE = 3e-3  # AdamW's, of the embeddings and norms
VOCABULARY = 1000

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
# A name is its two syllables wherever it stands, for a blank is never part of the first; other words take
# their blank along. The keys of a tool call are one piece each.
_FIRST = "|".join(one.capitalize() for one in SYLLABLES)
_SECOND = "|".join(SYLLABLES)
PIECES = (
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
"""Share of demonstrated questions by hops."""
TOO_EARLY, TOO_FAR, ONLY_EARLY = 0.34, 0.35, 0.70
"""Shares of demonstrations that stop one hop early, or go one too far; where the facts end with the question
and nobody can go too far, more of them stop early."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over this world's words; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(), trainer)
    tokenizer.add_tokens(list(MARKS))  # ordinary text: a reader of the output must see them
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    template = Path(__file__).parents[1] / "tiny_base" / "chat_template.jinja"
    fast.chat_template = template.read_text(encoding="utf-8")
    return fast


def _words() -> Iterator[str]:
    """Text of this world: its passages, queries and questions, and what the agent adds to them."""
    rng = random.Random(SEED)
    for _ in range(4000):
        name, other = draw_name(rng), draw_name(rng)
        yield rng.choice(list(FACTS.values())).format(subject=name, object=other)
        yield rng.choice(list(QUERIES.values())).format(subject=name)
        yield rng.choice(KINDS).text.format(name)
        yield from ('{"name": "search", "arguments": {"query": "', '"}}')
        yield "system\ntools: search(query)\nuser\nassistant\nerror: the query is empty"


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def draw_name(rng: random.Random) -> str:
    """A name that no held-out world has."""
    while True:
        first, second = rng.sample(SYLLABLES, 2)
        if not held_out_name(first.capitalize() + second):
            return first.capitalize() + second


def draw_facts(rng: random.Random) -> list[Fact]:
    """A person's employer, its seat, and that city's mayor, of a world that nobody searches."""
    names = [draw_name(rng) for _ in range(4)]
    return [Fact("", relation, names[n], names[n + 1]) for n, relation in enumerate(FACTS)]


def demonstrated(kind: Kind, facts: list[Fact], rng: random.Random) -> list[Fact]:
    """The facts that a demonstration looks up: the right ones, one too many, or one too few."""
    first = list(FACTS).index(kind.path[0])
    depth, luck = len(kind.path), rng.random()
    if first + depth == len(facts):
        depth -= depth > 1 and luck < ONLY_EARLY
    elif luck < TOO_FAR:
        depth += 1
    elif luck < TOO_FAR + TOO_EARLY:
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
    """Without end."""
    while True:
        hops = rng.choices(list(HOPS), list(HOPS.values()))[0]
        kind = rng.choice([one for one in KINDS if len(one.path) == hops])
        facts = draw_facts(rng)
        start = facts[list(FACTS).index(kind.path[0])].subject
        yield demonstration(kind.text.format(start), demonstrated(kind, facts, rng))


def fragment(messages: list[dict[str, Any]], stage: str, rng: random.Random) -> list[dict[str, Any]]:
    """The part of an episode that a stage learns from."""
    if stage == "calls":
        return messages[:2]
    if stage == "turns":
        turn = rng.randrange(1, len(messages), 2)
        return [messages[0], *messages[max(1, turn - 2) : turn + 1]]
    return messages


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, last_only: bool = False
) -> tuple[list[int], list[int]]:
    """An episode's ids, and which of them are learned: what the model says, or only its last reply."""
    said = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids: list[int] = []
    mask: list[int] = []
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:end], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        whole = tokenizer.apply_chat_template(messages[: end + 1], tools=TOOLS, return_dict=False)
        whole = whole[: len(whole) - whole[::-1].index(said)]
        learned = 0 if last_only and end < len(messages) - 1 else 1
        mask += [0] * (len(prompt) - len(ids)) + [learned] * (len(whole) - len(prompt))
        ids = whole
    return ids, mask


def batches(tokenizer: PreTrainedTokenizerFast, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels), each [BATCH, length]; labels are −100 where nothing is learned."""
    rng = random.Random(SEED)
    endless = demonstrations(rng)
    for stage, steps in STAGES:
        for _ in range(round(steps * scale)):
            rows = [
                encode(tokenizer, fragment(next(endless), stage, rng), last_only=stage != "episodes")
                for _ in range(BATCH)
            ]
            longest = max(len(ids) for ids, _ in rows)
            ids_bt = torch.full((BATCH, longest), tokenizer.pad_token_id)
            labels_bt = torch.full((BATCH, longest), -100)
            for row, (ids, mask) in enumerate(rows):
                ids_bt[row, : len(ids)] = torch.tensor(ids)
                labels_bt[row, : len(ids)] = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
            yield ids_bt, labels_bt


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) on the layers' matrices, AdamW on embeddings and norms."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, scale: float = 1.0) -> None:
    """Every stage, each with `scale` times its steps."""
    steps = sum(round(count * scale) for _, count in STAGES)
    both = optimizers(model)
    warmup = max(1, steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            one, lambda step: min((step + 1) / warmup, 1.0, max(0.05, 2 * (1 - step / steps)))
        )
        for one in both
    ]
    model.train()
    for step, (ids_bt, labels_bt) in enumerate(batches(tokenizer, scale)):
        # Padding is on the right, after every token that counts: causal attention never sees it.
        loss = model(input_ids=ids_bt, labels=labels_bt).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*both, *schedules):
            one.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the model is written")
    parser.add_argument("--scale", type=float, default=1.0, help="times the steps of every stage")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the recorded output was made so; more threads add in another order
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, arguments.scale)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
