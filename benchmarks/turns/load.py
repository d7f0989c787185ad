"""The load generator: agents with minimal cost, the same for every system.

    python -m turns.load

Reads jobs from stdin, one JSON object per line, and prints one line per job. Session histories are kept
between jobs, by session name; connections last for one job.
`{"kind": "turns", "url", "sessions": [[name, path, key]], "turns", "concurrency", "stream"}` runs `turns`
turns in each session, `concurrency` sessions at a time, and prints `{"seconds", "turns", "errors",
"error"}`; an error ends the turns of its session. With `"for_s"` and `"every_s"` instead of `"turns"`, each
session runs a turn every `every_s` seconds for `for_s` seconds. The output also has `"p99_ms"`.
`{"kind": "posts", "url", "sessions": [[name, path, key]], "size", "for_s"}` repeatedly posts a message of
`size` bytes for `for_s` seconds, and prints `{"posts", "statuses", "seconds_each"}`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop
from turns.material import SYSTEM, TOOL, TURN_TOKENS, question

_REQUEST = (
    b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %b\r\n"
    b"content-type: application/json\r\naccept: application/json\r\ncontent-length: %d\r\n\r\n"
)
_REPLY_S = 120.0
_PASSAGE = "The quick brown fox jumps over the lazy dog, and <b>nothing</b> happened; value = 12345\n"


class Connection(asyncio.Protocol):
    """One keep-alive HTTP connection, for one call at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server = transport.get_extra_info("peername")[:2]
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def post(self, path: bytes, key: bytes, body: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._transport.is_closing():  # servers close idle connections
            await loop.create_connection(lambda: self, *self._server)
        self._answer = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._transport.write(_REQUEST % (path, key, len(body)) + body)
        return await self._answer

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the server closed the connection"))


class Agent:
    """One session: sends requests and extends the history after each reply."""

    def __init__(self, name: str, path: str, key: str) -> None:
        self._path, self._key = path.encode(), key.encode()
        self.taken = 0
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question(name)},
        ]

    async def turn(self, connection: Connection, stream: bool) -> None:
        body = {
            "model": "m",
            "messages": self._messages,
            "tools": [TOOL],
            "max_tokens": TURN_TOKENS,
            "temperature": 1.0,
            "stream": stream,
        }
        status, answer = await connection.post(self._path, self._key, orjson.dumps(body))
        if status != 200:
            raise ConnectionError(f"{status}: {answer[:200]!r}")
        message = _streamed(answer) if stream else orjson.loads(answer)["choices"][0]["message"]
        self._messages.append(message)
        self.taken += 1
        calls = message.get("tool_calls")
        if calls:
            self._messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "42"})
        else:
            text = f"Step {self.taken} is not right yet. Go on."
            self._messages.append({"role": "user", "content": text})


def _streamed(answer: bytes) -> dict[str, Any]:
    """Assembles the message from the deltas of a stream."""
    content, calls = "", []
    for event in answer.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        delta = orjson.loads(event[6:])["choices"][0]["delta"]
        content += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append(piece)
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


class Load:
    def __init__(self) -> None:
        self._agents: dict[str, Agent] = {}

    async def turns(self, job: dict[str, Any]) -> dict[str, Any]:
        address = urlsplit(job["url"])
        agents = [
            self._agents.setdefault(name, Agent(name, path, key)) for name, path, key in job["sessions"]
        ]
        queue, errors, took = iter(agents), [], []
        before = sum(agent.taken for agent in agents)
        connections = await self._connect(address.hostname or "", address.port or 0, job["concurrency"])
        began = time.perf_counter()
        try:
            await asyncio.gather(*(self._work(one, queue, job, errors, took) for one in connections))
        finally:
            for connection in connections:
                connection.close()
        seconds = time.perf_counter() - began
        taken = sum(agent.taken for agent in agents) - before
        done = {"seconds": seconds, "turns": taken, "errors": len(errors), "error": next(iter(errors), None)}
        return {**done, "p99_ms": 1e3 * sorted(took)[int(0.99 * len(took))] if took else None}

    async def posts(self, job: dict[str, Any]) -> dict[str, Any]:
        address = urlsplit(job["url"])
        [[_, path, key]] = job["sessions"]
        text = (_PASSAGE * (job["size"] // len(_PASSAGE) + 1))[: job["size"]]
        body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        [connection] = await self._connect(address.hostname or "", address.port or 0, 1)
        statuses: Counter[str] = Counter()
        began = time.perf_counter()
        try:
            while time.perf_counter() < began + job["for_s"]:
                async with asyncio.timeout(_REPLY_S):
                    status, _ = await connection.post(path.encode(), key.encode(), body)
                statuses[str(status)] += 1
        finally:
            connection.close()
        posts = statuses.total()
        each = (time.perf_counter() - began) / posts
        return {"posts": posts, "statuses": statuses, "seconds_each": each}

    async def _connect(self, host: str, port: int, count: int) -> list[Connection]:
        loop = asyncio.get_running_loop()
        return [(await loop.create_connection(Connection, host, port))[1] for _ in range(count)]

    async def _work(
        self,
        connection: Connection,
        queue: Iterator[Agent],
        job: dict[str, Any],
        errors: list[str],
        took: list[float],
    ) -> None:
        for agent in queue:
            try:
                async for began in _beginnings(job):
                    async with asyncio.timeout(_REPLY_S):
                        await agent.turn(connection, job["stream"])
                    took.append(time.perf_counter() - began)
            except (OSError, TimeoutError, httptools.HttpParserError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                return


async def _beginnings(job: dict[str, Any]) -> AsyncIterator[float]:
    """Start times of the turns of a session."""
    if "every_s" not in job:
        for _ in range(job["turns"]):
            yield time.perf_counter()
        return
    now = time.perf_counter()
    end = now + job["for_s"]
    due = now + random.random() * job["every_s"]
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield due
        due = max(due + job["every_s"], time.perf_counter())


async def main() -> None:
    load = Load()
    for line in sys.stdin:
        job = orjson.loads(line)
        result = await {"posts": load.posts, "turns": load.turns}[job["kind"]](job)
        print(orjson.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
