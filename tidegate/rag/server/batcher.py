"""Batches of questions: gathered from the first one's arrival, answered one batch at a time in a thread.

A batch begins `window_s` after its first question came, or at once when it is full; what came while the one
before it was computed has waited long enough, so under load no time is spent on waiting. Equal questions
that are under way together are computed once. Everyone who waits has a deadline; a question that nobody
waits for any more is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import islice

from tidegate.errors import ConfigError, RetrievalUnavailable
from tidegate.rag.client import SearchResult
from tidegate.rag.server.metrics import RetrievalMetrics
from tidegate.rag.server.query import Answer, Query


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Durations in seconds."""

    window_s: float = 0.002
    max_batch: int = 64
    """Questions of one batch."""
    queue: int = 4096
    """Questions that may wait or be computed at the same time; more are refused as `overloaded`."""
    deadline_s: float = 30.0
    """How long a question may wait for its answer."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what nothing could be answered with."""
        if self.max_batch < 1 or self.queue < 1:
            raise ConfigError(
                f"a batch of {self.max_batch} and a queue of {self.queue} queries: each must hold at least 1"
            )
        if not (self.window_s >= 0 and self.deadline_s > 0):
            raise ConfigError(
                f"a window of {self.window_s:g} s and a deadline of {self.deadline_s:g} s: the window must "
                "be at least 0, the deadline more"
            )


@dataclass(slots=True)
class _Entry:
    question: Query
    arrived: float
    askers: set[asyncio.Future[Answer]] = field(default_factory=set)


class QueryBatcher:
    """Made within a running event loop. `answer` is called in `executor`, never twice at the same time; it
    gives an answer for each question, in their order."""

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
        self._queued: dict[Query, _Entry] = {}
        self._running: dict[Query, _Entry] = {}
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.waiting = 0
        """Questions that somebody waits for."""
        self.running_since: float | None = None
        """Of the batch that is computed now, on the clock `time.monotonic`."""
        self._runner = asyncio.create_task(self._run())

    @property
    def failed(self) -> str | None:
        """How the task that runs batches ended, which it must not."""
        if not self._runner.done() or self._runner.cancelled():
            return None
        return f"no batches are run any more: {self._runner.exception()!r}"

    async def ask(self, questions: Sequence[Query]) -> list[list[SearchResult]]:
        """The answers in their order. All of the questions are taken, or none.

        Raises RetrievalUnavailable: `overloaded`, `deadline`, or why a search failed.
        """
        self._admit(len(questions))
        asked = [(entry, self._join(entry)) for entry in map(self._entry, questions)]
        self.waiting += len(asked)
        try:
            async with asyncio.timeout(self._options.deadline_s):
                answers = [await future for _, future in asked]
        except TimeoutError:
            raise RetrievalUnavailable(
                f"no answer within {self._options.deadline_s:g} s: {self.waiting} questions wait",
                code="deadline",
            ) from None
        finally:
            self.waiting -= len(asked)
            for entry, future in asked:
                self._leave(entry, future)
        found = []
        for answer in answers:
            if isinstance(answer, RetrievalUnavailable):
                raise answer
            found.append(answer)
        return found

    async def drain(self) -> None:
        """End when everything that was asked is answered, or late. Nothing more may be asked."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.deadline_s):
                await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """End; who still waits is told. The batch that is computed now is not waited for."""
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)
        gone = RetrievalUnavailable("the server is being stopped", code="stopping")
        for entry in (*self._queued.values(), *self._running.values()):
            _tell(entry, gone)

    # -- who waits -------------------------------------------------------------------------------

    def _admit(self, count: int) -> None:
        if self.failed is not None:
            raise RetrievalUnavailable(self.failed)
        if self.waiting + count > self._options.queue:
            raise RetrievalUnavailable(
                f"{self.waiting} questions wait already, of at most {self._options.queue}", code="overloaded"
            )

    def _entry(self, question: Query) -> _Entry:
        entry = self._running.get(question) or self._queued.get(question)
        if entry is not None:
            self._metrics.joined += 1
            return entry
        entry = self._queued[question] = _Entry(question, time.monotonic())
        self._idle.clear()
        self._arrived.set()
        if len(self._queued) >= self._options.max_batch:
            self._full.set()
        return entry

    def _join(self, entry: _Entry) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        entry.askers.add(future)
        return future

    def _leave(self, entry: _Entry, future: asyncio.Future[Answer]) -> None:
        future.cancel()
        entry.askers.discard(future)
        if not entry.askers and self._queued.get(entry.question) is entry:
            del self._queued[entry.question]
            self._metrics.dropped += 1
            self._rest()

    def _rest(self) -> None:
        if not self._queued and not self._running:
            self._idle.set()

    # -- batches ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._until_due()
            batch = self._take()
            questions = [entry.question for entry in batch]
            answers = await loop.run_in_executor(self._executor, self._answer, questions)
            self._deliver(batch, answers)

    async def _until_due(self) -> None:
        """Until a batch should begin: there is at least one question then."""
        while True:
            while not self._queued:
                self._arrived.clear()
                await self._arrived.wait()
            first = next(iter(self._queued.values()))
            left = first.arrived + self._options.window_s - time.monotonic()
            if left <= 0 or len(self._queued) >= self._options.max_batch:
                return
            self._full.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._full.wait()

    def _take(self) -> list[_Entry]:
        batch = list(islice(self._queued.values(), self._options.max_batch))
        now = self.running_since = time.monotonic()
        for entry in batch:
            del self._queued[entry.question]
            self._running[entry.question] = entry
            self._metrics.wait_seconds.add(now - entry.arrived)
        self._metrics.batch_size.add(len(batch))
        return batch

    def _deliver(self, batch: list[_Entry], answers: list[Answer]) -> None:
        if self.running_since is not None:
            self._metrics.batch_seconds.add(time.monotonic() - self.running_since)
        self.running_since = None
        for entry, answer in zip(batch, answers, strict=True):
            del self._running[entry.question]
            _tell(entry, answer)
        self._rest()


def _tell(entry: _Entry, answer: Answer) -> None:
    for future in entry.askers:
        if not future.done():
            future.set_result(answer)
