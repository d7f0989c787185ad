"""The SDK's own client and Tidegate's, against a server whose answers a test gives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from openai import AsyncOpenAI

from tests.scripted_server import Scripted, ScriptedServer, scripted
from tidegate.agents.sdk.client import new_openai

ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REPLY = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "three"}, "finish_reason": "stop", "x": 1}
    ],
}


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(status: int, *headers: str) -> bytes:
    body = orjson.dumps({"error": {"message": "as asked", "code": "c", "type": "t"}})
    return response(status, body, "content-type: application/json", *headers)


OK = response(200, orjson.dumps(REPLY), "content-type: application/json", "x-request-id: r1")
EVENTS = [
    {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m",
     "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    for text in ("th", "ree")
]  # fmt: skip
SSE = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in EVENTS)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = STREAM_HEAD + chunk(SSE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
RESET, CLOSE, HANG = "reset", "close", "hang"
Answer = bytes | str


@dataclass
class Answers:
    """Answers of a server, one for each request on any connection; then OK."""

    answers: list[Answer]
    requests: list[bytes] = field(default_factory=list)

    async def __call__(self, connection: Scripted) -> None:
        while True:
            self.requests.append(await connection.request())
            answer = self.answers.pop(0) if self.answers else OK
            for part in answer if isinstance(answer, tuple) else (answer,):
                if part == RESET:
                    return connection.reset()
                if part == CLOSE:
                    return None
                if part == HANG:
                    return await connection.until_closed()
                await connection.send(part)
                await asyncio.sleep(0)


Clients = dict[str, Callable[..., AsyncOpenAI]]


def clients() -> Clients:
    """The SDK's own client, and Tidegate's."""
    return {"stock": AsyncOpenAI, "lean": new_openai}


Call = Callable[[AsyncOpenAI], Awaitable[Any]]


async def create(llm: AsyncOpenAI, **arguments: Any) -> Any:
    return (await llm.chat.completions.create(**{"model": "m", "messages": ASK, **arguments})).model_dump()


async def streamed(llm: AsyncOpenAI) -> Any:
    async with await llm.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
        return [event.choices[0].delta.content async for event in stream]


async def outcomes(call: Call, *answers: Any, **options: Any) -> dict[str, Any]:
    """For each client: what the call returns or raises, and the requests that the server received."""
    found: dict[str, Any] = {}
    for name, new in clients().items():
        script = Answers(list(answers))
        async with scripted(*[script] * 20) as server:
            options = {"max_retries": 3, "timeout": 30.0, **options}
            async with new(base_url=f"{server.url}/v1", api_key="key", **options) as llm:
                found[name] = (await outcome(call(llm)), [normal(one, server) for one in script.requests])
    return found


async def outcome(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except Exception as error:  # noqa: BLE001 - compared
        cause = type(error.__cause__).__name__
        status = getattr(error, "status_code", None)
        return type(error).__name__, str(error), cause, status, getattr(error, "body", None)


def normal(request: bytes, server: ScriptedServer) -> bytes:
    request = request.replace(server.url.partition("//")[2].encode(), b"HOST")
    request = re.sub(rb"(?i)python-httpx2?/[\d.]+", b"httpx", request)
    request = re.sub(
        rb"(?i)(accept-encoding: .*), zstd", rb"\1", request
    )  # by what each module finds installed
    request = re.sub(rb"idempotency-key: .*\r\n", b"", request, flags=re.IGNORECASE)
    head, _, body = request.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    named = [header.partition(b":") for header in headers]
    # The keep-alive that HTTP/1.1 has anyway is sent by httpx alone.
    lines = sorted(
        name.lower() + mark + value for name, mark, value in named if name.lower() != b"connection"
    )
    return b"\r\n".join([line, *lines, b"", body])


async def alike(call: Call, *answers: Any, **options: Any) -> tuple[Any, list[bytes]]:
    """Checks that all clients do the same; returns it."""
    found = await outcomes(call, *answers, **options)
    stock = found.pop("stock")
    for name, other in found.items():
        assert other == stock, name
    return stock
