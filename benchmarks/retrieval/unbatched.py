"""A server to compare with: the same index and encoder, one thread, and each query searched by itself.

python -m retrieval.unbatched INDEX ANNOUNCE
"""

from __future__ import annotations

import asyncio
import sys
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

K = 5


def main() -> None:
    directory, announce = sys.argv[1:]
    searcher, executor = Searcher(Path(directory), threads=1), ThreadPoolExecutor(1)

    def look_up(query: str) -> list[dict[str, Any]]:
        return [
            {"id": hit.id, "text": hit.text, "score": hit.score} for hit in searcher.search([query], [K])[0]
        ]

    async def search(request: Request) -> Response:
        query = orjson.loads(await request.body())["query"]
        found = await asyncio.get_running_loop().run_in_executor(executor, look_up, query)
        return Response(orjson.dumps({"results": [found]}))

    app = Starlette(routes=[Route("/v1/search", search, methods=["POST"])])
    listen = Listen(announce=Path(announce))
    run_app(app, bind(listen), listen)


if __name__ == "__main__":
    main()
