"""An agent of a service desk on the plain `openai` SDK and the official `mcp` client.

The model's tools come from the session's MCP server; what it writes to the customer goes to the environment's
counterpart.
"""

from __future__ import annotations

import json
import ssl
from typing import Any

import httpx2
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tidegate.agents.base import Session
from tidegate.types import TaskView

MAX_TURNS = 16
TLS = ssl.create_default_context()
"""Shared by all episodes: making one takes 25 ms, which is more than the rest of a connection."""


async def desk(task: TaskView, session: Session) -> str | None:
    """Serves one customer; returns the last reply."""
    llm, messages, content = session.openai(), [*task.messages], None
    async with (
        httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {session.api_key}"}, timeout=session.remaining(), verify=TLS
        ) as http,
        streamable_http_client(session.mcp_url, http_client=http) as (read, write),
        ClientSession(read, write) as mcp,
    ):
        await mcp.initialize()
        tools = [openai_schema(tool) for tool in (await mcp.list_tools()).tools]
        for _ in range(MAX_TURNS):
            reply = await llm.chat.completions.create(model=session.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            content = message.content
            messages.append(message.model_dump(exclude_none=True))
            if message.tool_calls:
                messages += [await call_tool(mcp, call) for call in message.tool_calls]
            elif (following := await session.respond(messages[-1])) is not None:
                messages.append(following)
            else:
                break
    return content


def openai_schema(tool: Any) -> dict[str, Any]:
    """Returns a tool of an MCP server in the format of OpenAI's `tools`."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


async def call_tool(mcp: ClientSession, call: Any) -> dict[str, Any]:
    """Calls a tool; returns the message with its result."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError as error:
        text = f"the arguments are not JSON: {error}"
    else:
        result = await mcp.call_tool(call.function.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
    return {"role": "tool", "tool_call_id": call.id, "content": text}
