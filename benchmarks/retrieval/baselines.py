"""Servers to compare with: the same index and encoder, searched with one thread, batched otherwise.

    python -m retrieval.baselines unbatched|window INDEX ANNOUNCE

`unbatched` searches each query by itself, one after another. `window` gathers queries for WINDOW_S from the
first one on, whatever else happens, and searches them together.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.rag.index.searcher import Searcher
from tidegate.service.serve import Listen, bind, run_app

WINDOW_S, MAX_BATCH, K = 0.1, 64, 5
Rows = list[dict[str, Any]]
Asked = tuple[str, asyncio.Future[Rows]]


def look_up(searcher: Searcher, queries: Sequence[str]) -> list[Rows]:
    """What a server answers for each query."""
    return [
        [{"id": hit.id, "text": hit.text, "score": hit.score} for hit in hits]
        for hits in searcher.search(queries, [K] * len(queries))
    ]


class Window:
    """Batches that begin WINDOW_S after their first query."""

    def __init__(self, answer: Callable[[Sequence[str]], list[Rows]]) -> None:
        self._answer = answer
        self._executor = ThreadPoolExecutor(1)
        self._queue: asyncio.Queue[Asked] = asyncio.Queue()
        self._runner: asyncio.Task[None] | None = None

    async def ask(self, query: str) -> Rows:
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((query, future))
        return await future

    async def _run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(WINDOW_S)
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            queries = [query for query, _ in batch]
            found = await asyncio.get_running_loop().run_in_executor(self._executor, self._answer, queries)
            for (_, future), rows in zip(batch, found, strict=True):
                future.set_result(rows)


class Unbatched:
    """One query at a time."""

    def __init__(self, answer: Callable[[Sequence[str]], list[Rows]]) -> None:
        self._answer = answer
        self._executor = ThreadPoolExecutor(1)

    async def ask(self, query: str) -> Rows:
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(self._executor, self._answer, [query]))[0]


def main() -> None:
    kind, directory, announce = sys.argv[1:]
    searcher = Searcher(Path(directory), threads=1)
    searches = {"unbatched": Unbatched, "window": Window}[kind](lambda queries: look_up(searcher, queries))

    async def search(request: Request) -> Response:
        query = orjson.loads(await request.body())["query"]
        return Response(orjson.dumps({"results": [await searches.ask(query)]}))

    app = Starlette(routes=[Route("/v1/search", search, methods=["POST"])])
    listen = Listen(announce=Path(announce))
    run_app(app, bind(listen), listen)


if __name__ == "__main__":
    main()
