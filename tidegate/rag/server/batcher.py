"""Batches queries and answers one batch at a time in a thread.

A batch starts `window_s` after its first query arrived, or at once when it is full. After a batch, the next
one waits for the callers that were answered and ask again, as long as queries arrive at short intervals. If
the previous batch had one query, as with a lone client, or if `window_s` is 0, a batch starts at once. Equal
queries in progress are computed once. A caller has a deadline; a query without callers is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice

from tidegate.errors import ConfigError, RetrievalUnavailable
from tidegate.rag.client import SearchResult
from tidegate.rag.server.metrics import RetrievalMetrics
from tidegate.rag.server.query import Answer, Query

_PAUSE, _LONGEST = 1 / 8, 1 / 2
"""Longest pause between two queries after which a batch still waits for more, and longest time that it waits
after the previous one; as shares of the previous one's duration."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Durations in seconds."""

    window_s: float = 0.002
    max_batch: int = 64
    """Maximum queries per batch."""
    queue: int = 4096
    """Maximum queries that wait or are computed; more are refused as `overloaded`."""
    deadline_s: float = 30.0
    """Maximum time from a query to its answer."""

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.queue < 1:
            raise ConfigError(f"max_batch = {self.max_batch}, queue = {self.queue}: both must be at least 1")
        if not (self.window_s >= 0 and self.deadline_s > 0):
            raise ConfigError(
                f"window_s = {self.window_s:g}, deadline_s = {self.deadline_s:g}: the window must be at "
                "least 0 and the deadline more than 0"
            )


@dataclass(slots=True)
class _PendingQuery:
    query: Query
    arrived: float
    answer: asyncio.Future[Answer]
    callers: int = 0


class QueryBatcher:
    """Batches the queries of an event loop, in which it must be created.

    `answer` is called in `executor`, never twice at the same time; it returns one answer per query, in order.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Query]], list[Answer]],
        executor: Executor,
        options: BatchOptions,
        metrics: RetrievalMetrics,
    ) -> None:
        self._answer = answer
        self._executor = executor
        self._options = options
        self._metrics = metrics
        self._queued: dict[Query, _PendingQuery] = {}
        self._running: dict[Query, _PendingQuery] = {}
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.waiting = 0
        """Number of queries with a waiting caller."""
        self.running_since: float | None = None
        """Start of the current batch on the clock `time.monotonic`, or None."""
        self._delivered = 0.0
        """End of the latest batch on the clock `time.monotonic`, and its duration."""
        self._batch_took_s = 0.0
        self._lone = True
        """Whether the latest batch, if there was one, had a single query."""
        self._runner = asyncio.create_task(self._run())

    @property
    def failed(self) -> str | None:
        """The error that ended the task that runs batches, or None."""
        if not self._runner.done() or self._runner.cancelled():
            return None
        return f"the task that runs batches has failed: {self._runner.exception()!r}"

    async def answer(self, queries: Sequence[Query]) -> list[list[SearchResult]]:
        """Returns the answers in order. Accepts either all queries or none.

        Raises RetrievalUnavailable with the code `overloaded`, `deadline` or that of a failed search.
        """
        self._admit(len(queries))
        pending = [self._join(query) for query in queries]
        self.waiting += len(pending)
        try:
            async with asyncio.timeout(self._options.deadline_s):
                answers = [await asyncio.shield(entry.answer) for entry in pending]
        except TimeoutError:
            raise RetrievalUnavailable(
                f"no answer within {self._options.deadline_s:g} s; {self.waiting} queries are waiting",
                code="deadline",
            ) from None
        finally:
            self.waiting -= len(pending)
            for entry in pending:
                self._leave(entry)
        results = []
        for answer in answers:
            if isinstance(answer, RetrievalUnavailable):
                raise answer
            results.append(answer)
        return results

    async def drain(self) -> None:
        """Closes the batcher once all queries are answered or past the deadline; add none meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.deadline_s):
                await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Closes the batcher and fails waiting queries, without waiting for the current batch."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        stopping = RetrievalUnavailable("the server is stopping", code="stopping")
        for entry in (*self._queued.values(), *self._running.values()):
            if not entry.answer.done():  # it is when the batcher is closed twice
                entry.answer.set_result(stopping)

    # -- callers --------------------------------------------------------------------------------

    def _admit(self, count: int) -> None:
        if self.failed is not None:
            raise RetrievalUnavailable(self.failed)
        if self.waiting + count > self._options.queue:
            raise RetrievalUnavailable(
                f"{self.waiting} queries are waiting, and the limit is {self._options.queue}; retry later",
                code="overloaded",
            )

    def _join(self, query: Query) -> _PendingQuery:
        entry = self._running.get(query) or self._queued.get(query)
        if entry is not None:
            self._metrics.joined_queries += 1
        else:
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            entry = self._queued[query] = _PendingQuery(query, time.monotonic(), answer)
            self._idle.clear()
            self._arrived.set()
        entry.callers += 1
        return entry

    def _leave(self, entry: _PendingQuery) -> None:
        entry.callers -= 1
        if not entry.callers and self._queued.get(entry.query) is entry:
            del self._queued[entry.query]
            self._metrics.dropped_queries += 1
            self._update_idle()

    def _update_idle(self) -> None:
        if not self._queued and not self._running:
            self._idle.set()

    # -- batches ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_until_due()
            batch = self._take()
            queries = [entry.query for entry in batch]
            answers = await loop.run_in_executor(self._executor, self._answer, queries)
            self._deliver(batch, answers)

    async def _wait_until_due(self) -> None:
        """Waits until the next batch should start; it then has at least one query."""
        while True:
            while not self._queued:
                self._arrived.clear()
                await self._arrived.wait()
            left = self._due() - time.monotonic()
            if left <= 0 or len(self._queued) >= self._options.max_batch:
                return
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    def _due(self) -> float:
        """Returns when the next batch starts, if it is not full before and no further query arrives.

        If 64 callers ask again when they are answered, the batch then has them all, and not one half in turns
        with the other, which costs 12% more CPU per query (2.80 and 2.48 ms, MiniLM and 50,000 vectors).
        """
        first = next(iter(self._queued.values())).arrived
        newest = next(reversed(self._queued.values())).arrived
        if self._lone or not self._options.window_s:
            return first
        pause_s, longest_s = self._batch_took_s * _PAUSE, self._batch_took_s * _LONGEST
        again = min(max(newest, self._delivered) + pause_s, self._delivered + longest_s)
        return max(first + self._options.window_s, again)

    def _take(self) -> list[_PendingQuery]:
        batch = list(islice(self._queued.values(), self._options.max_batch))
        now = self.running_since = time.monotonic()
        for entry in batch:
            del self._queued[entry.query]
            self._running[entry.query] = entry
            self._metrics.wait_seconds.observe(now - entry.arrived)
        self._metrics.batch_size.observe(len(batch))
        self._lone = len(batch) == 1
        return batch

    def _deliver(self, batch: list[_PendingQuery], answers: list[Answer]) -> None:
        if self.running_since is not None:
            self._delivered = time.monotonic()
            self._batch_took_s = self._delivered - self.running_since
            self._metrics.batch_seconds.observe(self._batch_took_s)
        self.running_since = None
        for entry, answer in zip(batch, answers, strict=True):
            del self._running[entry.query]
            entry.answer.set_result(answer)
        self._update_idle()
