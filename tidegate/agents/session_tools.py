"""Calls of a session's routes for tools and for the environment's counterpart."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tidegate.types import Message

if TYPE_CHECKING:
    from openai import AsyncOpenAI


_MAX_NAME = 256
"""Characters of a sampled tool name that are sent; names of tools have at most 64."""


async def tools(llm: AsyncOpenAI, url: str) -> list[dict[str, Any]]:
    """Returns the tools of the session at `url`."""
    answer: Any = await llm.get(f"{url}/tools", cast_to=object)
    found: list[dict[str, Any]] = answer["tools"]
    return found


async def call(llm: AsyncOpenAI, url: str, tool_call: Any) -> Message:
    """Calls a tool; returns its message."""
    data = tool_call if isinstance(tool_call, Mapping) else tool_call.model_dump()
    function, call_id = data["function"], data["id"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return _tool_message(call_id, f"the arguments of {function['name']!r} are not JSON: {error}")
    if not isinstance(arguments, dict):
        return _tool_message(call_id, f"the arguments of {function['name']!r} are not a JSON object")
    # Models make names up: dots would be removed from the path, and a URL has a maximum length.
    name = quote(function["name"][:_MAX_NAME], safe="", errors="replace").replace(".", "%2E")
    answer = await _post(llm, f"{url}/tools/{name}", arguments)
    return _tool_message(call_id, answer["content"])


async def respond(llm: AsyncOpenAI, url: str, message: Message) -> Message | None:
    """Passes a reply to the counterpart; returns the next message, None if the conversation is over."""
    answer = await _post(llm, f"{url}/respond", {"message": message})
    following: Message | None = None if answer["done"] else answer["message"]
    return following


def _tool_message(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def _post(llm: AsyncOpenAI, url: str, body: Mapping[str, Any]) -> Any:
    """Sends a request with the SDK's client, which repeats it as it repeats model calls."""
    # Not a tool call's id: some clients give several calls the same one.
    headers = {"idempotency-key": uuid.uuid4().hex}
    return await llm.post(url, cast_to=object, body=body, options={"headers": headers})
