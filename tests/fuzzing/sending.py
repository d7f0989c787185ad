"""Sends the requests of fuzzed clients that no dialect reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

import aiohttp

from tests.fakes import Stage
from tests.fuzzing.stories import Case, Failure


class Sender:
    """Sends requests, counts the statuses, and fails at one that it does not expect."""

    def __init__(self, stage: Stage, http: aiohttp.ClientSession, statuses: Collection[int]) -> None:
        self._stage = stage
        self._http = http
        self._statuses = statuses
        self.seen: Counter[str] = Counter()

    async def send(self, method: str, path: str, case: Case, body: bool = True) -> tuple[int, bytes]:
        """Raises Failure, also if the response says that the gateway itself failed."""
        data = case.body if body else None
        try:
            async with (
                asyncio.timeout(20),
                self._http.request(
                    method, self._stage.url + path, data=data, headers=case.headers
                ) as response,
            ):
                status, answer = response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise Failure(f"{method} {path}: {error!r}", case) from error
        self.seen[str(status)] += 1
        what = f"{method} {path[:200]}: {status} {answer[:500]!r}"
        if b"internal gateway error" in answer:
            raise Failure(f"the gateway failed inside: {what}", case)
        if status not in self._statuses:
            raise Failure(what, case)
        return status, answer
