"""Makes the customer-service demo's base model: `python -m examples.service_base.make --out DIR` (minutes).

A Qwen3-shaped model of under a million parameters with its own tokenizer. It is trained on conversations of a
scripted agent that often errs. The model therefore knows the tools, the wording and how to copy numbers and
names, but often skips a check, refuses what is allowed or does what is forbidden: that is left to
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.bases import recipe
from examples.bases.names import SYLLABLES
from examples.service.env import RULES, CustomerService
from examples.service.scenario import make_scenario
from examples.service_base.clerk import Clerk, Mistakes
from tidegate.envs.base import Done
from tidegate.envs.tools import Tool, ToolError
from tidegate.types import Task

SEED = 17
BATCH = 32
STAGES = (("copies", 300), ("bare", 360), ("whole", 240))
"""Training stages with their steps: many tool calls in one reply, to learn copying; conversations without the
rules' text, which is the longest message and always the same; whole conversations."""
COPY_SHARE = 0.3
"""Share of the examples of the first stage's kind in the later ones, so that copying is not unlearned."""
SORTED_BATCHES = 4
"""Batches among which conversations are sorted by length, so that there is little padding."""
VOCABULARY = 1000
MAX_TURNS = 16

MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A name is always two tokens, its syllables, and a number of four digits two pairs of digits; other words
# include their leading space, and the one that follows if a name or number is next: what is copied then has
# the same tokens everywhere, after a token that tells its meaning. Each key of a tool call is one piece.
_FIRST = "|".join(syllable.capitalize() for syllable in SYLLABLES)
_SECOND = "|".join(SYLLABLES)
_NAME = f"(?:{_FIRST})(?:{_SECOND})(?![a-z])"
PATTERN = (
    rf"(?:{_FIRST})(?=(?:{_SECOND})(?![a-z]))|(?<=[A-Z][a-z][a-z])(?:{_SECOND})(?![a-z])"
    r'|\{?"?[a-z_]+"[:,] [{"]*'
    rf"| ?(?!{_NAME})[A-Za-z_]+(?: (?=[0-9]|{_NAME}))?|[0-9]{{2}}|[0-9]|[^A-Za-z0-9\s]+|\s"
)
MISTAKES = Mistakes(
    no_identity=0.18, idle=0.2, no_look=0.2, too_strict=0.32, too_lax=0.25, no_stock=0.3, gives_in=0.35
)  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    return recipe.train_tokenizer(_words(), pattern=PATTERN, markers=MARKERS, vocabulary=VOCABULARY)


def _words() -> Iterator[str]:
    """Text of this world: conversations, all syllables and all pairs of digits."""
    tools = CustomerService().tools()
    stream = demonstrations(random.Random(SEED))
    for _ in range(1500):
        for message in next(stream):
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
    return recipe.random_model(tokenizer, seed=SEED, layers=3, init_std=0.06)


async def conversation(
    environment: CustomerService, tools: Mapping[str, Tool], task: Task, clerk: Clerk
) -> list[dict[str, Any]]:
    """The messages of one conversation of the scripted agent."""
    state = await environment.setup(task)
    messages: list[dict[str, Any]] = list(task.messages)
    for _ in range(MAX_TURNS):
        reply = clerk.reply(messages)
        messages.append(reply)
        if calls := reply.get("tool_calls"):
            function = calls[0]["function"]
            try:
                result = tools[function["name"]].fn(state, json.loads(function["arguments"]))
            except ToolError as error:
                result = str(error)
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


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[Any], tools: Any
) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and a mask of the agent's tokens: as `recipe.encode`, but rendered once."""
    ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    begin = tokenizer.encode("<|im_start|>assistant\n")
    end = tokenizer.eos_token_id
    ids = ids[: len(ids) - ids[::-1].index(end)]
    mask, inside = [], False
    for at, token in enumerate(ids):
        inside = inside or ids[max(0, at - len(begin)) : at] == begin
        mask.append(int(inside))
        inside = inside and token != end
    return ids, mask


def copy_example(rng: random.Random) -> list[dict[str, Any]]:
    """A customer's data in random order, and one reply with a call of each tool that takes them.

    An order that was looked at names another item, which is not to be copied.
    """
    scenario = make_scenario(SEED, "train", rng.randrange(10_000_000))
    number = next(
        key for key, customer in scenario.database.customers.items() if customer.name == scenario.name
    )
    order, other = rng.sample(list(scenario.database.orders), 2)
    address, item = scenario.database.orders[other].address, rng.choice(list(scenario.database.stock))
    found = scenario.database.orders[order]
    wishes = (f"send order {order} to {address}", f"exchange order {order} for a {item}")
    read = [
        {"role": "user", "content": f"I am {scenario.name}, zip code {scenario.zip_code}."},
        {"role": "tool", "content": f"customer {number}"},
        {"role": "tool", "content": f"{found.item}, {found.price} euros, {found.status}"},
        {"role": "user", "content": f"Please {wishes[0]}. Thanks. And please {wishes[1]}."},
    ]
    calls = [
        ("find_customer", {"name": scenario.name, "zip": scenario.zip_code}),
        ("find_order", {"customer": number, "order": order}),
        ("find_item", {"item": item}),
        ("exchange_order", {"order": order, "item": item}),
        ("readdress_order", {"order": order, "address": address}),
    ]
    rng.shuffle(read)
    rng.shuffle(calls)
    made = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    return [*read, {"role": "assistant", "content": "", "tool_calls": made}]


def example(stage: str, stream: Iterator[list[Any]], rng: random.Random) -> list[Any]:
    """The messages of one example of a stage."""
    copied = stage == "copies" or rng.random() < COPY_SHARE
    messages = [{"role": "system", "content": RULES}, *copy_example(rng)] if copied else next(stream)
    return messages if stage == "whole" else messages[1:]


def batches(tokenizer: PreTrainedTokenizerFast, scale: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (ids, labels), each [BATCH, length]."""
    rng = random.Random(SEED)
    stream = demonstrations(rng)
    schemas = [tool.schema() for tool in CustomerService().tools()]
    for stage, steps in STAGES:
        tools = schemas if stage == "whole" else None
        for _ in range(max(1, round(steps * scale / SORTED_BATCHES))):
            parts = [example(stage, stream, rng) for _ in range(BATCH * SORTED_BATCHES)]
            rows = [encode(tokenizer, part, tools) for part in parts]
            rows.sort(key=lambda row: len(row[0]))
            starts = list(range(0, len(rows), BATCH))
            rng.shuffle(starts)
            for start in starts:
                yield recipe.padded(rows[start : start + BATCH], tokenizer.pad_token_id)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, scale: float = 1.0) -> None:
    """Trains all stages, each for `scale` times its steps."""
    recipe.fit(
        model,
        batches(tokenizer, scale),
        recipe.muon_and_adamw(model),
        steps=sum(SORTED_BATCHES * max(1, round(count * scale / SORTED_BATCHES)) for _, count in STAGES),
        decay=recipe.decay_in_second_half,
        log_every=20,
    )


if __name__ == "__main__":
    recipe.main(str(__doc__), make_tokenizer, make_model, train)
