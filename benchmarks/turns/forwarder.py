"""The baseline: a minimal forwarder on FastAPI, orjson and aiohttp, run by Tidegate's own server.

    python -m turns.forwarder UPSTREAM ANNOUNCE

It reads a request, forwards it, reads the reply, keeps both by session, and responds; a streamed reply is
passed on as it arrives. It does not render prompts, check keys, parse tool calls or write to disk.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tidegate.service.serve import Listen, bind, run_app


def create_app(upstream: str) -> FastAPI:
    kept: dict[str, list[Any]] = defaultdict(list)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as app.state.http:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/s/{session_id}/v1/chat/completions")
    async def chat(session_id: str, request: Request) -> Response:
        asked = orjson.loads(await request.body())
        if asked["stream"]:
            return StreamingResponse(streamed(session_id, asked), media_type="text/event-stream")
        async with app.state.http.post(upstream, data=orjson.dumps(asked)) as answer:
            body = await answer.read()
        kept[session_id].append((asked, orjson.loads(body)))
        return Response(body, media_type="application/json")

    async def streamed(session_id: str, asked: Any) -> AsyncIterator[bytes]:
        pieces = []
        async with app.state.http.post(upstream, data=orjson.dumps(asked)) as answer:
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                yield piece
        kept[session_id].append((asked, b"".join(pieces)))

    return app


if __name__ == "__main__":
    listen = Listen(announce=Path(sys.argv[2]))
    run_app(create_app(sys.argv[1] + "/v1/chat/completions"), bind(listen), listen)
