"""Conversations with the customer-service environment in the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from examples.service.env import CustomerService, ServiceEpisode
from tidegate.envs.base import Done
from tidegate.envs.tools import ToolError
from tidegate.types import Message, Scored, Task

Replies = Callable[[Sequence[Any]], Message]
"""Returns an assistant's next message."""


async def converse(environment: CustomerService, task: Task, reply: Replies) -> tuple[Scored, list[Message]]:
    """Runs one episode; returns its score and its messages."""
    state: ServiceEpisode = await environment.setup(task)
    tools = {tool.name: tool for tool in environment.tools()}
    messages = list(task.messages)
    for _ in range(20):
        messages.append(reply(messages))
        if calls := messages[-1].get("tool_calls"):
            function = calls[0]["function"]
            try:
                result = tools[function["name"]].fn(state, json.loads(function["arguments"]))
            except ToolError as error:
                result = str(error)
            messages.append({"role": "tool", "content": result})
            continue
        answer = await environment.respond(state, messages[-1])
        if isinstance(answer, Done):
            break
        messages.append({"role": "user", "content": answer})
    return environment.score(task, None, None, messages, state), messages


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}
