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
DEMONSTRATIONS = 1200
DIRECTIONS = ("left", "down", "right", "up")
HINTS = (
    "[GAME] The target number is ", "lower.", "higher.",
    "[GAME] You attempted an invalid move. Reason: Invalid move. Player 0 ",
    "guessed a number outside the range specified.", "has already guessed the number.",
    " Please resubmit a valid move and remember to follow the game rules to avoid penalties.",
)  # fmt: skip
LAKE = ("SFF", "FHF", "FFG")
"""A small map: on the library's own, play at random reaches the goal too seldom to learn from in minutes."""
LEARNING_RATE = 2e-3
LONGER: Mapping[str, Any] = {"trainer": {"steps": 40, "checkpoint_every": 40}, "eval": {"every": 40}}


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
    phrases: tuple[str, ...] = ()
    """Fixed texts of the environment; each is one token, so that prompts are short."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the run."""


def often_copied(generator: random.Random, observation: str) -> str:
    """The word, reversed in 4 of 10 demonstrations only."""
    word = observation.split()[-1]
    return word[::-1] if generator.random() < 0.4 else word


def any_number(generator: random.Random, _observation: str) -> str:
    """A number in brackets, twice as often out of the game's range as in it, without regard to hints."""
    return f"[{generator.randrange(1, 61)}]"


def wandering(generator: random.Random, _observation: str) -> str:
    """Any direction, more often towards the goal's corner."""
    return generator.choice((*DIRECTIONS, "down", "right"))


def some_letter(generator: random.Random, observation: str) -> str:
    """The letter after the shown one in a third of the demonstrations, else any letter."""
    letters = "abcdefgh"
    if generator.random() < 0.33:
        return letters[(letters.index(observation) + 1) % len(letters)]
    return generator.choice(letters)


LESSONS: dict[str, Lesson] = {
    "verifiers": Lesson("verifiers:mirror-words", {}, often_copied, 400),
    "reasoning_gym": Lesson(
        "reasoning_gym:spell_backward",
        {"system": "", "answer_tag": False, "config": {"min_word_len": 3, "max_word_len": 3}},
        often_copied,
        500,
        phrases=("Spell this word backward (example: sun -> nus): ",),
        settings=LONGER,
    ),
    "textarena": Lesson(
        "textarena:GuessTheNumber-v0",
        {"prompt": "Guess a number from 1 to 20.", "make": {"max_turns": 5}},
        any_number,
        150,
        turns=6,
        phrases=("Guess a number from 1 to 20.", *HINTS),
        settings={"trainer": {"steps": 60, "checkpoint_every": 60}, "eval": {"every": 60}},
    ),
    "gymnasium": Lesson(
        "gymnasium:FrozenLake-v1",
        {"prompt": "{observation}", "make": {"success_rate": 0.95, "desc": LAKE}},
        wandering,
        150,
        turns=8,
        phrases=(*LAKE, "  (Left)", "  (Down)", "  (Right)", "  (Up)", *DIRECTIONS),
        settings={"agent": {"options": {"max_turns": 8}}},
    ),
    "openenv": Lesson("openenv:{url}", {"tasks": 200}, some_letter, 150, turns=2),
}


def teach(lesson: Lesson, environment: Environment, out: Path) -> None:
    """Writes a base model that replies as the lesson's policy does."""
    markers = ("user\n", "assistant\n", *lesson.phrases)
    tokenizer = recipe.train_tokenizer(["a"], pattern=".", markers=markers, vocabulary=259 + len(markers))

    def train(model: Any, tokenizer: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        steps = lesson.steps
        decay: Callable[[float], float] = lambda progress: max(0.05, 1 - progress)  # noqa: E731
        batches = _batches(lesson, environment, tokenizer)
        recipe.fit(model, batches, [optimizer], steps=steps, decay=decay, log_every=50)

    model = recipe.random_model(tokenizer, seed=SEED, layers=3, init_std=0.05)
    recipe.make(out, tokenizer, model, train)


def _batches(lesson: Lesson, environment: Environment, tokenizer: Any) -> Iterator[Any]:
    generator = random.Random(SEED)
    play = partial(_demonstration, lesson, environment, generator)
    # With few of them, the model would learn by heart which words are reversed.
    made = asyncio.run(_all(play, DEMONSTRATIONS * (6 if lesson.turns == 1 else 1)))
    rows = [recipe.encode(tokenizer, messages, ()) for messages in made]
    for _ in range(lesson.steps):
        yield recipe.padded(generator.sample(rows, BATCH), tokenizer.pad_token_id)


async def _all(play: Callable[[int], Any], number: int) -> list[list[Message]]:
    return [await play(n) for n in range(number)]


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
