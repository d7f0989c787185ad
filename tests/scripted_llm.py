"""An OpenAI-compatible endpoint with scripted replies, for tests of agents without a gateway."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from tests.http_app import served_app

Reply = dict[str, Any]
"""An assistant message, without its role."""


def tool_call(name: str, arguments: str | dict[str, Any], id: str = "call_1") -> Reply:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


@contextlib.asynccontextmanager
async def scripted_llm(reply: Callable[[dict[str, Any]], Reply]) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serves `reply(request body)`; yields the base URL and the list of requests so far."""
    requests: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append(body)
        message = {"role": "assistant", **reply(body)}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with served_app(app) as url:
        yield f"{url}/v1", requests
