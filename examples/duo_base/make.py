"""Makes the base model of the duo demo: `python -m examples.duo_base.make --out DIR` (minutes, one thread).

A Qwen3-shaped model of about a million parameters. It is trained on demonstrations of two roles: the solver,
which writes the expression that a word problem needs, and the verifier, which says whether one is right. Many
demonstrations of both are wrong on purpose, so that reinforcement learning has something to teach.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.duo.agent import verifier_messages
from examples.tiny_base.make import HABITS
from tidegate.envs.arithmetic import Problem, draw_problem, substitute_numbers

SEED = 23
STEPS = 750
LAST = 0.2  # share of the steps, at the end, with the mistakes
BATCH = 32
VOCABULARY = 1024
PATTERN = r" [-+*/] |[0-9]| ?[A-Za-z]+|[^A-Za-z0-9\s]+|\s"
"""Each digit is one piece, so that numbers are copied digit by digit; an operator includes its spaces."""

HABIT_SHARE, NOISE_SHARE = 0.44, 0.20
"""Shares of the solver's last demonstrations with its usual mistake, and with operators at random."""
RIGHT_SHARE = 0.45
"""Share of right expressions in the verifier's demonstrations."""
FLIPPED_SHARE = 0.40
"""Share of the verifier's last demonstrations with the wrong verdict."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=(), vocabulary=VOCABULARY)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=4, init_std=0.05)


def _words() -> Iterator[str]:
    rng = random.Random(SEED)
    for _ in range(4000):
        problem = draw_problem(rng)
        yield verifier_messages(problem.question, "(1 + 2 - 3) * 4 / 5")[0]["content"]
        yield "system\nuser\nassistant\nyes\nno"


def mistaken(problem: Problem, rng: random.Random, habit: float) -> str:
    """An expression with the template's usual mistake, with this probability, or with operators at random."""
    expression = problem.template.expression
    positions = [position for position, sign in enumerate(expression) if sign in HABITS]
    if rng.random() < habit:
        position = positions[sum(map(ord, problem.template.name)) % len(positions)]
        expression = expression[:position] + HABITS[expression[position]] + expression[position + 1 :]
    else:
        for position in positions:
            expression = expression[:position] + rng.choice("+-*/") + expression[position + 1 :]
    return substitute_numbers(expression, problem.numbers)


def demonstrations(rng: random.Random, *, last: bool) -> Iterator[list[recipe.Message]]:
    """Yields demonstrations of both roles in turn, without end, without held-out problems.

    The last ones are often wrong; those before teach to copy numbers and to compare.
    """
    wrong, flipped = (HABIT_SHARE + NOISE_SHARE, FLIPPED_SHARE) if last else (0.0, 0.0)
    habit = HABIT_SHARE / (HABIT_SHARE + NOISE_SHARE)
    while True:
        problem = draw_problem(rng)
        if problem.held_out:
            continue
        expression = mistaken(problem, rng, habit) if rng.random() < wrong else problem.expression
        yield [
            {"role": "user", "content": problem.question}, {"role": "assistant", "content": expression},
        ]  # fmt: skip
        expression = problem.expression if rng.random() < RIGHT_SHARE else mistaken(problem, rng, habit)
        verdict = (expression == problem.expression) != (rng.random() < flipped)
        asked = verifier_messages(problem.question, expression)
        yield [*asked, {"role": "assistant", "content": "yes" if verdict else "no"}]


def batches(tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of (ids, labels), each [BATCH, length]."""
    rng = random.Random(SEED)
    streams = {last: demonstrations(rng, last=last) for last in (False, True)}
    for step in range(steps):
        stream = streams[step >= steps * (1 - LAST)]
        rows = [recipe.encode(tokenizer, next(stream), []) for _ in range(BATCH)]
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
