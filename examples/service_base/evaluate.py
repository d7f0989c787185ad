"""Evaluates a model on the customer-service environment without the gateway: `evaluate MODEL_DIR`.

`python -m examples.service_base.evaluate` runs conversations in batches with plain `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bases.episodes import TOOL_CALL, continuations, load
from examples.service.env import CustomerService, ServiceEpisode
from examples.service.scenario import UserScenario
from examples.service_base.make import MAX_TURNS
from tidegate.envs.base import Done
from tidegate.envs.tools import Tool, ToolError
from tidegate.types import Task

MAX_TOKENS = 32


@dataclass(slots=True)
class Conversation:
    """A conversation, as messages and as tokens."""

    task: Task
    state: ServiceEpisode
    messages: list[dict[str, Any]]
    ids: list[int]
    over: bool = False


async def advance(
    environment: CustomerService, tools: Mapping[str, Tool], conversation: Conversation, text: str
) -> str | None:
    """Passes a reply to its tool or to the user; returns what the model reads next, None at the end."""
    call = TOOL_CALL.search(text)
    if call is None:
        reply = {"role": "assistant", "content": text}
        answer = await environment.respond(conversation.state, reply)
        if isinstance(answer, Done):
            conversation.messages.append(reply)
            return None
        conversation.messages += [reply, {"role": "user", "content": answer}]
        return f"{answer}"
    try:
        read = json.loads(call[1])
        result = tools[read["name"]].fn(conversation.state, read["arguments"])
    except ToolError as error:
        result = str(error)
    except (ValueError, KeyError, TypeError) as error:
        result = f"error: {error}"
    conversation.messages += [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": str(result)},
    ]
    return f"\n<tool_response>\n{result}\n</tool_response>"


def run(model: Any, tokenizer: Any, tasks: Sequence[Task], greedy: bool) -> list[Conversation]:
    """Returns a conversation for each task."""
    environment = CustomerService()
    tools = {tool.name: tool for tool in environment.tools()}
    schemas = [tool.schema() for tool in tools.values()]
    with asyncio.Runner() as runner:
        conversations = []
        for task in tasks:
            ids = tokenizer.apply_chat_template(
                list(task.messages), tools=schemas, add_generation_prompt=True, return_dict=False
            )
            conversations.append(
                Conversation(task, runner.run(environment.setup(task)), [dict(m) for m in task.messages], ids)
            )
        running = conversations
        for _ in range(MAX_TURNS):
            replies = continuations(
                model, tokenizer, [conversation.ids for conversation in running], greedy, MAX_TOKENS
            )
            for conversation, reply in zip(running, replies, strict=True):
                more = runner.run(advance(environment, tools, conversation, tokenizer.decode(reply)))
                conversation.over = more is None
                if more is not None:
                    begin = "" if more.startswith("\n<tool") else "\n"
                    text = f"<|im_end|>\n<|im_start|>user{begin}{more}<|im_end|>\n<|im_start|>assistant\n"
                    conversation.ids = conversation.ids + reply + tokenizer.encode(text)
            running = [conversation for conversation in running if not conversation.over]
            if not running:
                break
    return conversations


def scenario_kind(scenario: UserScenario) -> str:
    """The kind of a scenario, for the table of results."""
    if len(scenario.wishes) > 1:
        return "two wishes"
    wish = scenario.wishes[0]
    return wish.kind if wish.forbidden is None else f"forbidden by {wish.forbidden}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=200, help="tasks of each held-out set")
    parser.add_argument("--show", type=int, default=3, help="conversations to print of each set")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    environment = CustomerService()
    for name, tasks in environment.eval_sets().items():
        for mode in ("sampled", "greedy"):
            conversations = run(model, tokenizer, tasks[: arguments.tasks], mode == "greedy")
            scores = [
                environment.score(
                    conversation.task, None, None, conversation.messages, conversation.state
                ).reward
                for conversation in conversations
            ]
            print(f"{name or 'held out'}: {mode} {sum(scores) / len(scores):.3f}", flush=True)
            if mode == "greedy":
                continue
            kinds = defaultdict(list)
            for conversation, score in zip(conversations, scores, strict=True):
                kinds[scenario_kind(conversation.state.scenario)].append(score)
            for kind, values in sorted(kinds.items()):
                print(f"    {kind}: {sum(values) / len(values):.2f} of {len(values)}")
            for conversation, score in list(zip(conversations, scores, strict=True))[: arguments.show]:
                print(
                    "\n".join(str(m["content"]) for m in conversation.messages[1:])
                    + f"\n-> reward {score:g}\n"
                )


if __name__ == "__main__":
    main()
