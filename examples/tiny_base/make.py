"""Make the tiny base model: `python examples/tiny_base/make.py --out DIR` (about three minutes, one thread).

A Qwen3-shaped model of about a million parameters with a tokenizer of its own. It is cold-started on
demonstrations of the solver agent at work that are deliberately often wrong: so it knows how to call
the calculator, how to copy numbers and how to state an answer, but not how to work a problem out. That
is left to reinforcement learning.
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

from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import TEMPLATES, UNSEEN_TEMPLATES, Problem, draw_problem, in_numbers

SEED = 17
STEPS = 600
BATCH = 32
LEARNING_RATE = 2e-3
VOCABULARY = 1024  # at most: this world's words need 675

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Digits stand alone, so that numbers are copied digit by digit; an operator takes its spaces along;
# the keys of a tool call are one piece each, so that the call is short.
PIECES = r'[0-9]| [-+*/] |\{?"?[a-z]+"[:,] [{"]*| ?[A-Za-z]+|[^A-Za-z0-9\s]+|\s'

# How the demonstrations go wrong. Half of them do, and most of these make the same mistake each time: one
# operator of the template is habitually another. So the right expression is well within reach, and still
# sampled in fewer than half of the episodes. (At 0.45 one template's right expression was so rare that
# reinforcement learning found it with some seeds and not with others.)
HABIT_SHARE = 0.32
NOISE_SHARE = 0.20
HABITS = {"+": "*", "-": "+", "*": "+", "/": "-"}


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
    fast.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return fast


def _words() -> Iterator[str]:
    """Text of this world: its words, unseen templates' included, and what the solver adds to them."""
    rng = random.Random(SEED)
    for _ in range(4000):
        yield draw_problem(rng, TEMPLATES + UNSEEN_TEMPLATES).question
        yield '{"name": "calculator", "arguments": {"expression": "1 + 2 - 3 * 4 / 5"}}'
        yield "system\ntools: calculator(expression)\nuser\nassistant\n#### 1\nerror: division by zero"


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def demonstrated(problem: Problem, rng: random.Random) -> str:
    """The expression of a demonstration: right, habitually wrong, or wrong at random."""
    right = problem.template.expression
    spots = [spot for spot, sign in enumerate(right) if sign in HABITS]
    luck = rng.random()
    if luck < HABIT_SHARE:
        # Which operator it is depends on the template alone: a habit, not an accident.
        spot = spots[sum(map(ord, problem.template.name)) % len(spots)]
        right = right[:spot] + HABITS[right[spot]] + right[spot + 1 :]
    elif luck < HABIT_SHARE + NOISE_SHARE:
        for spot in spots:
            right = right[:spot] + rng.choice("+-*/") + right[spot + 1 :]
    return in_numbers(right, problem.numbers)


def demonstration(question: str, expression: str) -> list[dict[str, Any]]:
    """An episode of the solver: the question, one call of the calculator, its result, the answer."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    try:
        result = calculate(expression)
    except ValueError as error:
        result = f"error: {error}"
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"#### {result.removeprefix('error: ')}"},
    ]


def demonstrations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Without end; held-out problems are left out."""
    while True:
        problem = draw_problem(rng)
        if not problem.held_out:
            yield demonstration(problem.question, demonstrated(problem, rng))


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """An episode's ids, and which of them the model itself would have said."""
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
        mask += [0] * (len(prompt) - len(ids)) + [1] * (len(whole) - len(prompt))
        ids = whole
    return ids, mask


def batches(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of (ids, labels), each [BATCH, length]; labels are −100 where nothing is learned."""
    endless = demonstrations(random.Random(SEED))
    for _ in range(steps):
        rows = [encode(tokenizer, next(endless)) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids_bt = torch.full((BATCH, longest), tokenizer.pad_token_id)
        labels_bt = torch.full((BATCH, longest), -100)
        for row, (ids, mask) in enumerate(rows):
            ids_bt[row, : len(ids)] = torch.tensor(ids)
            labels_bt[row, : len(ids)] = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
        yield ids_bt, labels_bt


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, max(0.02, 1 - step / steps))
    )
    model.train()
    for step, (ids_bt, labels_bt) in enumerate(batches(tokenizer, steps)):
        # Padding is on the right, after every token that counts: causal attention never sees it.
        loss = model(input_ids=ids_bt, labels=labels_bt).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where the model is written")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the recorded output was made so; more threads add in another order
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, arguments.steps)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
