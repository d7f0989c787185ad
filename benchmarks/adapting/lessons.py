"""A tiny base model for each library, taught the form of replies by demonstrations that are mostly wrong."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from adapting.scores import PEERS, Policy

from examples.bases import recipe
from tidegate.envs.base import Done, Environment, load_environment
from tidegate.types import Message

SEED = 11
BATCH = 48
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Lesson:
    """An environment, and what its base model is taught."""

    use: str
    options: Mapping[str, Any]
    policy: Policy
    """The demonstrated replies."""
    steps: int
    """Optimiser steps on demonstrations."""
    turns: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the run."""


def half_reversed(generator: random.Random, observation: str) -> str:
    """The word's letters: reversed in a third of the demonstrations, else in any order."""
    letters = list(observation.split()[-1])
    if generator.random() < 0.33:
        return "".join(reversed(letters))
    generator.shuffle(letters)
    return "".join(letters)


def any_number(generator: random.Random, _observation: str) -> str:
    """A number in brackets, as often out of the game's range as in it, and without regard to hints."""
    return f"[{generator.randrange(1, 41)}]"


def wandering(generator: random.Random, _observation: str) -> str:
    """Any direction, more often towards the goal's corner."""
    return generator.choice(("left", "up", "down", "right", "down", "right"))


def any_letter(generator: random.Random, _observation: str) -> str:
    """Any letter."""
    return generator.choice("abcdefgh")


LESSONS: dict[str, Lesson] = {
    "verifiers": Lesson("verifiers:mirror-words", {}, half_reversed, 400),
    "reasoning_gym": Lesson(
        "reasoning_gym:spell_backward",
        {"system": "", "answer_tag": False, "config": {"min_word_len": 3, "max_word_len": 4}},
        half_reversed,
        500,
    ),
    "textarena": Lesson(
        "textarena:GuessTheNumber-v0",
        {"prompt": "Guess a number from 1 to 20.", "make": {"max_turns": 5}},
        any_number,
        150,
        turns=6,
    ),
    "gymnasium": Lesson(
        "gymnasium:FrozenLake-v1",
        {"prompt": "{observation}", "make": {"success_rate": 0.95}},
        wandering,
        150,
        turns=12,
    ),
    "openenv": Lesson("openenv:{url}", {"tasks": 200}, any_letter, 100, turns=2),
}


def teach(lesson: Lesson, environment: Environment, out: Path) -> None:
    """Writes a base model that replies as the lesson's policy does."""
    tokenizer = recipe.train_tokenizer(["a"], pieces=".", marks=(), vocabulary=259)

    def train(model: Any, tokenizer: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        steps = lesson.steps
        falls: Callable[[float], float] = lambda part: max(0.05, 1 - part)  # noqa: E731
        batches = _batches(lesson, environment, tokenizer)
        recipe.learn(model, batches, [optimizer], steps=steps, falls=falls, say_every=50)

    model = recipe.random_model(tokenizer, seed=SEED, layers=3, spread=0.05)
    recipe.make(out, tokenizer, model, train)


def _batches(lesson: Lesson, environment: Environment, tokenizer: Any) -> Iterator[Any]:
    generator = random.Random(SEED)
    play = partial(_demonstration, lesson, environment, generator)
    rows: list[Any] = []
    for step in range(lesson.steps):
        # Demonstrations of several turns are repeated, as they are slow to make.
        if lesson.turns == 1 or len(rows) < 20 * BATCH:
            made = asyncio.run(_all(play, BATCH, step * BATCH))
            fresh = [recipe.encode(tokenizer, messages, ()) for messages in made]
            rows += fresh if lesson.turns > 1 else []
        else:
            fresh = generator.sample(rows, BATCH)
        yield recipe.padded(fresh, tokenizer.pad_token_id)


async def _all(play: Callable[[int], Any], number: int, first: int) -> list[list[Message]]:
    return [await play(first + n) for n in range(number)]


async def _demonstration(
    lesson: Lesson, environment: Environment, generator: random.Random, index: int
) -> list[Message]:
    task = environment.train_task(index)
    messages = list(task.messages)
    if lesson.turns == 1:
        return [*messages, _said(lesson.policy(generator, messages[-1]["content"]))]
    state = await environment.setup(task)
    for _ in range(lesson.turns):
        messages.append(_said(lesson.policy(generator, messages[-1]["content"])))
        answer = await environment.respond(state, messages[-1])
        if isinstance(answer, Done):
            break
        messages.append({"role": "user", "content": answer})
    await environment.teardown(state)
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def _said(reply: Any) -> Message:
    return {"role": "assistant", "content": reply}


def environment_of(lesson: Lesson, url: str) -> tuple[str, Environment]:
    """Returns the environment's name in settings, and the environment."""
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
    use = re.sub(re.escape("{url}"), url, lesson.use)
    return use, load_environment(use, lesson.options)
