"""Makes the customer-service demo's base model: `python -m examples.service_base.make --out DIR` (minutes).

A Qwen3-shaped model of under a million parameters with its own tokenizer. It is trained on conversations of a
scripted agent that often errs. The model therefore knows the tools, the wording and how to copy numbers and
names, but often skips a check, refuses what is allowed or does what is forbidden: that is left to
reinforcement learning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.service_base.clerk import Clerk, Mistakes
from tidegate.envs.base import Done
from tidegate.envs.customer_service.customer_service import CustomerService
from tidegate.envs.names import SYLLABLES
from tidegate.envs.tools import Tool, ToolError
from tidegate.types import Task

SEED = 17
BATCH = 32
STAGES = (("bare", 300), ("whole", 100))
"""Training stages with their steps: conversations without the policy's text, which is the longest message
and always the same; whole conversations."""
MATRIX_RATE = 0.02  # learning rate of Muon
OTHER_RATE = 3e-3  # learning rate of AdamW, for embeddings and norms
VOCABULARY = 1000
MOST_TURNS = 16

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A name is always two tokens, its syllables, and a number of four digits two pairs of digits; other words
# include their leading space. Each key of a tool call is one piece.
_FIRST = "|".join(one.capitalize() for one in SYLLABLES)
_SECOND = "|".join(SYLLABLES)
PIECES = (
    rf"(?:{_FIRST})(?=(?:{_SECOND})(?![a-z]))|(?<=[A-Z][a-z][a-z])(?:{_SECOND})(?![a-z])"
    r'|\{?"?[a-z_]+"[:,] [{"]*'
    rf"| ?(?!(?:{_FIRST})(?:{_SECOND})(?![a-z]))[A-Za-z_]+|[0-9]{{2}}|[0-9]|[^A-Za-z0-9\s]+|\s"
)
MISTAKES = Mistakes(
    no_identity=0.15, no_look=0.2, too_strict=0.4, too_lax=0.35, no_stock=0.3, gives_in=0.35
)  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pieces=PIECES, marks=MARKS, vocabulary=VOCABULARY)


def _words() -> Iterator[str]:
    """Text of this world: conversations, all syllables and all pairs of digits."""
    tools = CustomerService().tools()
    endless = demonstrations(random.Random(SEED))
    for _ in range(1500):
        for message in next(endless):
            yield str(message["content"])
            for call in message.get("tool_calls", ()):
                function = call["function"]
                yield f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
    for _ in range(20):
        for first in SYLLABLES:
            yield f"{first.capitalize()}{first} {first.capitalize()}ban"
        yield from (f"{number:02d}" for number in range(100))
        yield "system\ntools:\nuser\nassistant\nerror: I do not understand. Yes, please. no such item order"
        yield from (f" {tool.name}({', '.join(tool.parameters['properties'])})" for tool in tools)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return recipe.random_model(tokenizer, seed=SEED, layers=3, spread=0.06)


async def conversation(
    environment: CustomerService, tools: Mapping[str, Tool], task: Task, clerk: Clerk
) -> list[dict[str, Any]]:
    """The messages of one conversation of the scripted agent."""
    state = await environment.setup(task)
    messages: list[dict[str, Any]] = list(task.messages)
    for _ in range(MOST_TURNS):
        reply = clerk.reply(messages)
        messages.append(reply)
        if calls := reply.get("tool_calls"):
            function = calls[0]["function"]
            try:
                result = tools[function["name"]].fn(state, json.loads(function["arguments"]))
            except ToolError as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "content": result})
            continue
        answer = await environment.respond(state, reply)
        if isinstance(answer, Done):
            break
        messages.append({"role": "user", "content": answer})
    return messages


def demonstrations(rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yields demonstrations without end, of tasks that are not held out."""
    environment, clerk = CustomerService(seed=SEED), Clerk(MISTAKES, rng)
    tools = {tool.name: tool for tool in environment.tools()}
    with asyncio.Runner() as runner:
        for index in range(1_000_000):
            yield runner.run(conversation(environment, tools, environment.train_task(index), clerk))


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: Any) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and a mask of the agent's tokens. It equals `recipe.encode`, but renders once."""
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    begin = tokenizer.encode("<|im_start|>assistant\n")
    end = tokenizer.eos_token_id
    ids = ids[: len(ids) - ids[::-1].index(end)]
    mask, inside = [], False
    for at, one in enumerate(ids):
        inside = inside or ids[max(0, at - len(begin)) : at] == begin
        mask.append(int(inside))
        inside = inside and one != end
    return ids, mask


def batches(tokenizer: PreTrainedTokenizerFast, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels), each [BATCH, length]."""
    endless = demonstrations(random.Random(SEED))
    tools = [tool.schema() for tool in CustomerService().tools()]
    for stage, steps in STAGES:
        for _ in range(round(steps * scale)):
            parts = [next(endless) for _ in range(BATCH)]
            if stage == "bare":
                rows = [encode(tokenizer, part[1:], None) for part in parts]
            else:
                rows = [encode(tokenizer, part, tools) for part in parts]
            yield recipe.padded(rows, tokenizer.pad_token_id)


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, scale: float = 1.0) -> None:
    """Trains all stages, each for `scale` times its steps."""
    recipe.learn(
        model,
        batches(tokenizer, scale),
        optimizers(model),
        steps=sum(round(count * scale) for _, count in STAGES),
        falls=lambda part: max(0.05, 2 * (1 - part)),
        say_every=20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the steps of every stage")
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    recipe.make(arguments.out, tokenizer, make_model(tokenizer), partial(train, scale=arguments.scale))


if __name__ == "__main__":
    main()
