"""The load generator: agents with minimal cost, the same for every system.

    python -m turns.load

Reads jobs from stdin, one JSON object per line, and prints one line per job. Session histories are kept
between jobs, by session name; connections last for one job.
`{"kind": "turns", "url", "sessions": [[name, path, key]], "turns", "concurrency", "stream"}` runs `turns`
turns in each session, `concurrency` sessions at a time, and prints `{"seconds", "turns", "errors",
"error"}`; an error ends the turns of its session. With `"for_s"` and `"every_s"` instead of `"turns"`, each
session runs a turn every `every_s` seconds for `for_s` seconds; `"every_s"` beside `"turns"` paces these.
With `"added"`, each message after a reply has a text of that many words. The output also has `"p50_ms"` and
`"p99_ms"`.
`{"kind": "probe", "url", "path", "every_s", "until"}` requests a path until a file exists, and prints
`{"p50_ms", "p99_ms", "probes"}`.
`{"kind": "posts", "url", "sessions": [[name, path, key]], "size", "for_s"}` repeatedly posts a message of
`size` bytes for `for_s` seconds, and prints `{"posts", "statuses", "seconds_each"}`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop
from turns.material import SYSTEM, TOOL, TURN_TOKENS, passage, question

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

    async def get(self, path: bytes) -> tuple[int, bytes]:
        return await self._exchange(b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path)

    async def post(self, path: bytes, key: bytes, body: bytes) -> tuple[int, bytes]:
        return await self._exchange(_REQUEST % (path, key, len(body)) + body)

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._transport.is_closing():  # servers close idle connections
            await loop.create_connection(lambda: self, *self._server)
        self._answer = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._transport.write(data)
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

    def __init__(self, name: str, path: str, key: str, added: int = 0) -> None:
        self._name, self._added = name, added
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
        more = passage(f"{self._name}/{self.taken}", self._added)
        if calls:
            self._messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": f"42{more}"})
        else:
            text = f"Step {self.taken} is not right yet. Go on.{more}"
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
            self._agents.setdefault(name, Agent(name, path, key, job.get("added", 0)))
            for name, path, key in job["sessions"]
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
        return {**done, "p50_ms": _quantile(took, 0.5), "p99_ms": _quantile(took, 0.99)}

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

    async def probe(self, job: dict[str, Any]) -> dict[str, Any]:
        """Times GET requests, one after another; they end with the file `until`."""
        address, until = urlsplit(job["url"]), Path(job["until"])
        [connection] = await self._connect(address.hostname or "", address.port or 0, 1)
        took = []
        while not until.exists():  # noqa: ASYNC240 - a local file, in a process of its own
            began = time.perf_counter()
            async with asyncio.timeout(_REPLY_S):
                await connection.get(job["path"].encode())
            took.append(time.perf_counter() - began)
            await asyncio.sleep(job["every_s"])
        connection.close()
        return {"p50_ms": _quantile(took, 0.5), "p99_ms": _quantile(took, 0.99), "probes": len(took)}

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
    end = now + job.get("for_s", math.inf)
    due = now + random.random() * job["every_s"]
    for _ in itertools.count() if "for_s" in job else range(job["turns"]):
        if due >= end:
            return
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield due
        due = max(due + job["every_s"], time.perf_counter())


def _quantile(seconds: list[float], share: float) -> float | None:
    return 1e3 * sorted(seconds)[int(share * len(seconds))] if seconds else None


async def main() -> None:
    load = Load()
    for line in sys.stdin:
        job = orjson.loads(line)
        result = await {"posts": load.posts, "turns": load.turns, "probe": load.probe}[job["kind"]](job)
        print(orjson.dumps(result).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
