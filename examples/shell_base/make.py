"""Makes the shell demo's base model: `python -m examples.shell_base.make --out DIR` (about five minutes).

A Qwen3-shaped model of under a million parameters with its own tokenizer. It is trained on demonstrations of
an agent with a shell, in generated folders, many of them deliberately wrong. The model therefore knows the
commands and how to copy names and paths into them, but not which commands a task needs: that is left to
reinforcement learning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.shell.file_tasks import ANSWER, FIRST, SECOND, SUFFIXES, Folder, ShellTask, Step, draw_task

SEED = 17
BATCH = 32
STAGES = (("lists", 320), ("calls", 20), ("turns", 120), ("episodes", 260))
"""Training stages with their steps: copies of lists, first calls alone, beginnings of episodes, episodes."""
VOCABULARY = 1000

MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A name is always two tokens, its syllables; other words include the space before them, and a digit is one
# piece, so that names and numbers are copied in the same way wherever they occur.
_NAME = rf"(?:{'|'.join(FIRST)})(?:{'|'.join(SECOND)})(?![a-z])"
PATTERN = (
    rf"(?:{'|'.join(FIRST)})(?=(?:{'|'.join(SECOND)})(?![a-z]))"
    rf"|(?<=(?:{'|'.join(FIRST)}))(?:{'|'.join(SECOND)})(?![a-z])"
    rf'|\{{?"?[a-z]+"[:,] [{{"]*|[a-z]+=|\.[a-z]+| -[a-z]+| ?(?!{_NAME})[A-Za-z]+|[0-9]|[^A-Za-z0-9\s]|\s'
)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}},
    }
]
HABIT_SHARE, EARLY_SHARE = 0.49, 0.22
"""Shares of demonstrations with the kind's usual mistake, and of those that stop before the last command."""
NOTHING = "(no output)"


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=MARKERS, vocabulary=VOCABULARY)


def _words() -> Iterator[str]:
    """Text of this world: prompts, commands, outputs, and the agent's fixed text."""
    rng = random.Random(SEED)
    for _ in range(2000):
        for message in demonstration(draw_task(rng, "train"), rng):
            yield str(message["content"])
            for call in message.get("tool_calls", ()):
                yield json.dumps({"name": "bash", "arguments": call["function"]["arguments"]})
        yield "system\ntools: bash(command)\nuser\nassistant\n[exit status 1]"
        yield "grep: cat: sed: mv: mkdir: bash: line 1: No such file or directory"


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=3, init_std=0.06)


def mistaken_steps(task: ShellTask) -> tuple[Step, ...]:
    """The usual mistake with a kind of task, always the same one."""
    first = task.steps[0]
    name, path = task.names[0], task.target
    lines = task.before[path].splitlines()
    if task.kind == "find":  # the content, not the file's path
        return first, Step(f"cat {path} > {ANSWER}")
    if task.kind == "count":  # all lines of the file
        return Step(f"grep -c . {path}", str(len(lines))), Step(f"echo {len(lines)} > {ANSWER}")
    if task.kind == "edit":  # the setting becomes the whole file
        return first, Step(f"echo {task.field}={task.names[1]} > {path}")
    if task.kind == "move":  # a copy remains
        into = task.names[2]
        return first, Step(f"mkdir {into}"), Step(f"cp {path} {into}")
    return Step(f"grep -rl {name} *", path), Step(f"echo {path} > {ANSWER}")  # the file, not its content


def demonstrated_steps(task: ShellTask, rng: random.Random) -> tuple[Step, ...]:
    """The commands of a demonstration: right, with the usual mistake, or all but the last of either."""
    steps = mistaken_steps(task) if rng.random() < HABIT_SHARE else task.steps
    return steps[:-1] if rng.random() < EARLY_SHARE else steps


def demonstration(task: ShellTask, rng: random.Random) -> list[dict[str, Any]]:
    """An episode: the task, commands with their outputs, and the last reply."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    for step in demonstrated_steps(task, rng):
        function = {"name": "bash", "arguments": {"command": step.command}}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": step.output or NOTHING})
    messages.append({"role": "assistant", "content": "done"})
    return messages


def demonstrations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields demonstrations without end."""
    while True:
        yield demonstration(draw_task(rng, "train"), rng)


def draw_list(rng: random.Random) -> list[str]:
    """Ten names, paths or numbers, with which the model learns to copy."""
    folder = Folder(rng, "train")
    kinds = (folder.name, lambda: folder.path(rng.choice(SUFFIXES)), lambda: str(rng.randint(2, 9)))
    return [rng.choice(kinds)() for _ in range(10)]


def fragment(messages: list[dict[str, Any]], stage: str, rng: random.Random) -> list[dict[str, Any]]:
    """The part of an episode that a stage trains on."""
    if stage == "lists":
        text = " ".join(draw_list(rng))
        return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    if stage == "calls":
        return messages[:2]
    if stage == "turns":
        return messages[: rng.randrange(2, len(messages) + 1, 2)]
    return messages


def batches(tokenizer: PreTrainedTokenizerFast, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels), each [BATCH, length]."""
    rng = random.Random(SEED)
    stream = demonstrations(rng)
    for stage, steps in STAGES:
        for _ in range(round(steps * scale)):
            parts = [fragment(next(stream), stage, rng) for _ in range(BATCH)]
            rows = [recipe.encode(tokenizer, part, TOOLS) for part in parts]
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
