"""Judges for tests: an OpenAI-compatible endpoint that grades what an attempt asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.http_app import served_app

ATTEMPT = re.compile(r"<attempt(?:-(\d+))?-[0-9a-f]{12}>\n(.*?)\n</attempt", re.DOTALL)
NAMES = re.compile(r'"(\w+)": …')


def wished(text: str) -> float:
    """The grade that an attempt asks for in its last word; 0.5 if it asks for none."""
    with contextlib.suppress(ValueError):
        return float(text.split()[-1])
    return 0.5


def graded(body: dict[str, Any]) -> str:
    """A reply that grades each attempt by `wished`, by every criterion."""
    prompt = body["messages"][-1]["content"]
    attempts = ATTEMPT.findall(prompt)
    if attempts[0][0]:
        return json.dumps({"scores": {name: wished(text) for name, text in attempts}})
    return json.dumps({"scores": dict.fromkeys(NAMES.findall(prompt), wished(attempts[0][1]))})


@dataclass
class Endpoint:
    """The judge's requests so far, and what it does with the next ones."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    reply: Callable[[dict[str, Any]], str | tuple[int, str]] = graded
    hold: asyncio.Event | None = None
    """Replies wait for it."""
    loop: asyncio.AbstractEventLoop | None = None
    running: int = 0
    most: int = 0
    """Most calls at the same time."""

    def release(self) -> None:
        """Ends the hold, from any thread."""
        assert self.loop is not None
        assert self.hold is not None
        self.loop.call_soon_threadsafe(self.hold.set)
        self.hold = None

    def settings(self, **others: Any) -> dict[str, Any]:
        return {"url": self.url, "model": "grader", "rubric": "be right", **others}


@contextlib.asynccontextmanager
async def judging() -> AsyncIterator[Endpoint]:
    """Serves a judge."""
    endpoint = Endpoint(loop=asyncio.get_running_loop())

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        endpoint.requests.append(body)
        endpoint.headers.append(dict(request.headers))
        endpoint.running += 1
        endpoint.most = max(endpoint.most, endpoint.running)
        try:
            if endpoint.hold is not None:
                await endpoint.hold.wait()
            reply = endpoint.reply(body)
        finally:
            endpoint.running -= 1
        status, text = (200, reply) if isinstance(reply, str) else reply
        if status != 200:
            return web.json_response({"error": {"message": text}}, status=status)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        return web.json_response({"choices": [{"index": 0, "message": message}], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with served_app(app) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint


@contextlib.contextmanager
def judge_in_thread() -> Iterator[Endpoint]:
    """Serves a judge in a thread, for tests without a loop."""
    loop = asyncio.new_event_loop()
    serving = judging()
    endpoint = loop.run_until_complete(serving.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(serving.__aexit__(None, None, None))
        loop.close()
