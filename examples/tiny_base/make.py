"""Makes the tiny base model: `python -m examples.tiny_base.make --out DIR` (about three minutes, one thread).

A Qwen3-shaped model of about a million parameters with its own tokenizer. It is trained on demonstrations of
the solver agent, many of them deliberately wrong. The model therefore knows how to call the calculator, to
copy numbers and to state an answer, but not how to solve a problem: that is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.envs.arithmetic import TEMPLATES, UNSEEN_TEMPLATES, Problem, draw_problem, substitute_numbers

SEED = 17
STEPS = 600
BATCH = 32
LEARNING_RATE = 2e-3
VOCABULARY = 1024  # maximum; this world's words need 675

MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Each digit is one piece, so that numbers are copied digit by digit; an operator includes its spaces; each
# key of a tool call is one piece, so that the call is short.
PATTERN = r'[0-9]| [-+*/] |\{?"?[a-z]+"[:,] [{"]*| ?[A-Za-z]+|[^A-Za-z0-9\s]+|\s'

# Shares of wrong demonstrations. Half of all demonstrations are wrong, most of them in the same way: one
# operator of the template is always replaced by the same other one. The right expression then remains likely,
# but is sampled in fewer than half of the episodes. (At 0.45, the right expression of one template was so
# rare that reinforcement learning found it with some seeds only.)
HABIT_SHARE = 0.32
NOISE_SHARE = 0.20
HABITS = {"+": "*", "-": "+", "*": "+", "/": "-"}


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=MARKERS, vocabulary=VOCABULARY)


def _words() -> Iterator[str]:
    """Text of this world: its words, including those of unseen templates, and the solver's fixed text."""
    rng = random.Random(SEED)
    for _ in range(4000):
        yield draw_problem(rng, TEMPLATES + UNSEEN_TEMPLATES).question
        yield '{"name": "calculator", "arguments": {"expression": "1 + 2 - 3 * 4 / 5"}}'
        yield "system\ntools: calculator(expression)\nuser\nassistant\n#### 1\nerror: division by zero"


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=4, init_std=0.05)


def demonstrated_expression(problem: Problem, rng: random.Random) -> str:
    """The expression of a demonstration: right, wrong by the template's fixed mistake, or wrong at random."""
    expression = problem.template.expression
    positions = [position for position, sign in enumerate(expression) if sign in HABITS]
    drawn = rng.random()
    if drawn < HABIT_SHARE:
        # The wrong operator depends only on the template, so the mistake is always the same.
        position = positions[sum(map(ord, problem.template.name)) % len(positions)]
        expression = expression[:position] + HABITS[expression[position]] + expression[position + 1 :]
    elif drawn < HABIT_SHARE + NOISE_SHARE:
        for position in positions:
            expression = expression[:position] + rng.choice("+-*/") + expression[position + 1 :]
    return substitute_numbers(expression, problem.numbers)


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
    """Yields demonstrations without end, without held-out problems."""
    while True:
        problem = draw_problem(rng)
        if not problem.held_out:
            yield demonstration(problem.question, demonstrated_expression(problem, rng))


def batches(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of (ids, labels), each [BATCH, length]."""
    stream = demonstrations(random.Random(SEED))
    for _ in range(steps):
        rows = [recipe.encode(tokenizer, next(stream), TOOLS) for _ in range(BATCH)]
        yield recipe.padded(rows, tokenizer.pad_token_id)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    recipe.fit(
        model,
        batches(tokenizer, steps),
        [optimizer],
        steps=steps,
        decay=lambda progress: max(0.02, 1 - progress),
        log_every=50,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    recipe.make(arguments.out, tokenizer, make_model(tokenizer), partial(train, steps=arguments.steps))


if __name__ == "__main__":
    main()
