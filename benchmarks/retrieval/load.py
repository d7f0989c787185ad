"""The load generator: clients that ask one query at a time, the same for every server.

    python -m retrieval.load

Reads jobs on stdin, one JSON object a line, and answers each with one line. `{"url", "queries", "clients",
"seconds"}` lets so many clients ask for so long, each query once; what is under way then is waited for, so
that nothing of it is left to the server's next job. Without `seconds` every query is asked. The answer is
`{"seconds", "in_time" (answers with documents that came within them), "latencies" (of all of those, in
seconds), "first" (by query, the id of the best document), "codes" (of errors), "unanswered"}`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop
from turns.load import Connection

_REPLY_S = 120.0


class Tally:
    """What became of the queries that were asked until `end`."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.in_time = self.unanswered = 0
        self.latencies: list[float] = []
        self.first: dict[str, str] = {}
        self.codes: Counter[str] = Counter()

    def enter(self, query: str, status: int, answer: bytes, began: float) -> None:
        now, body = time.perf_counter(), orjson.loads(answer)
        if status == 200 and len(body["results"][0]) > 0:
            self.in_time += now <= self.end
            self.latencies.append(now - began)
            self.first[query] = body["results"][0][0]["id"]
        elif status != 200 and isinstance(body["error"]["code"], str):
            self.codes[body["error"]["code"]] += 1
        else:
            self.unanswered += 1


async def run(job: dict[str, Any]) -> dict[str, Any]:
    address = urlsplit(job["url"])
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(Connection, address.hostname, address.port))[1]
        for _ in range(job["clients"])
    ]
    began = time.perf_counter()
    tally, queries = Tally(began + (job["seconds"] or _REPLY_S)), iter(job["queries"])
    try:
        await asyncio.gather(*(_ask(one, queries, tally) for one in connections))
    finally:
        for connection in connections:
            connection.close()
    seconds = job["seconds"] or time.perf_counter() - began
    return {**vars(tally), "seconds": seconds}


async def _ask(connection: Connection, queries: Iterator[str], tally: Tally) -> None:
    while (began := time.perf_counter()) < tally.end and (query := next(queries, None)) is not None:
        try:
            async with asyncio.timeout(_REPLY_S):
                body = orjson.dumps({"query": query})
                status, answer = await connection.post(b"/v1/search", b"none", body)
            tally.enter(query, status, answer, began)
        except (OSError, TimeoutError, httptools.HttpParserError, ValueError, KeyError, TypeError):
            tally.unanswered += 1
            return


async def main() -> None:
    for line in sys.stdin:
        print(orjson.dumps(await run(orjson.loads(line))).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
