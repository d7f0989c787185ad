"""One retrieval server's service: an index that can be exchanged while questions are answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import ConfigError, RetrievalRefused, RetrievalUnavailable
from tidegate.loading import did_you_mean
from tidegate.prometheus import prometheus
from tidegate.rag.client import NO_DOCUMENT, SearchResult
from tidegate.rag.corpus.corpus import Document
from tidegate.rag.server.batcher import BatchOptions, QueryBatcher
from tidegate.rag.server.cache import Cache
from tidegate.rag.server.metrics import RetrievalMetrics
from tidegate.rag.server.query import Index, Query, answer_all

log = logging.getLogger("tidegate.rag")

MAX_K = 1000
MAX_DOCUMENTS = 65_536
"""In the answer to one request."""
MAX_QUERY = 32_768
"""Characters. An encoder reads less; what is longer is no query."""
_HANGS_S = 120.0
"""A batch that takes so long will not end: `/health` says so."""


@dataclass(frozen=True, slots=True)
class RagOptions:
    directory: Path
    """What `tidegate rag build` wrote."""
    mode: str | None = None
    """How is searched where a request does not say; None: the index's first mode."""
    k: int = 5
    """Documents where a request does not say."""
    threads: int = 1
    """Of one search."""
    device: str = "cpu"
    """Of the encoder."""
    encoder: str | None = None
    """Where the encoder's model is now, if it is not where it was when the index was built."""
    batches: BatchOptions = field(default_factory=BatchOptions)
    cache_bytes: int = 64 * 2**20
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 1 <= self.k <= MAX_K:
            raise ConfigError(f"k = {self.k}: at least 1 document, at most {MAX_K}")
        if self.threads < 1 or self.cache_bytes < 0:
            raise ConfigError(
                f"{self.threads} threads and a cache of {self.cache_bytes} bytes: at least 1 thread, and no "
                "less than 0 bytes"
            )


class _LoadedIndex:
    """An index in use, with what belongs to it alone: the questions under way, and the answers kept."""

    def __init__(
        self, index: Index, executor: ThreadPoolExecutor, options: RagOptions, metrics: RetrievalMetrics
    ) -> None:
        self.index = index
        self.cache = Cache(options.cache_bytes)
        self.batcher = QueryBatcher(
            lambda questions: answer_all(index, questions), executor, options.batches, metrics
        )


class Retrieval:
    """Opens an index with `open_index(directory, options)`, in a thread, and answers from it.

    `start` returns before the index is open; until then every question is `loading`. Where it cannot be
    opened `on_failure` is told why.
    """

    def __init__(
        self,
        options: RagOptions,
        open_index: Callable[[Path, RagOptions], Index],
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.options = options
        self.metrics = RetrievalMetrics()
        self.failed: str | None = None
        self._open_index = open_index
        self._on_failure = on_failure
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._current: _LoadedIndex | None = None
        self._exchange = asyncio.Lock()
        self._first: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._first = asyncio.create_task(self._load())

    async def close(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if self._current is not None:
            await self._current.batcher.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        return self._current is not None

    @property
    def waiting(self) -> int:
        """Queries that somebody waits for."""
        return 0 if self._current is None else self._current.batcher.waiting

    @property
    def method(self) -> str:
        """How is searched where a request does not say."""
        return _mode(self._generation().index, self.options.mode)

    @property
    def trouble(self) -> str | None:
        """What makes this process useless until it is started again; None: it is alive."""
        if self.failed is not None or self._current is None:
            return self.failed
        batcher = self._current.batcher
        if batcher.running_since is not None and time.monotonic() - batcher.running_since > _HANGS_S:
            return f"a search has not ended for {time.monotonic() - batcher.running_since:.0f} s"
        return batcher.failed

    # -- questions -------------------------------------------------------------------------------

    async def search(
        self, queries: Sequence[str], k: int | None = None, mode: str | None = None
    ) -> list[list[SearchResult]]:
        """For each query its best `k` documents, best first, from one and the same index.

        An empty query finds nothing. Raises RetrievalRefused, RetrievalUnavailable.
        """
        generation = self._generation()
        k = self.options.k if k is None else k
        mode = _mode(generation.index, mode or self.options.mode)
        _check(queries, k, self.options.batches.queue)
        self.metrics.queries += len(queries)
        questions = [Query(query, k, mode) for query in queries]
        answers: dict[Query, list[SearchResult]] = {}
        missing = []
        for question in dict.fromkeys(questions):
            held = generation.cache.get(question)
            if not question.query.strip():
                answers[question] = []
            elif held is not None:
                answers[question] = held
                self.metrics.cache_hits += 1
            else:
                missing.append(question)
        if missing:
            found = await generation.batcher.ask(missing)
            for question, answer in zip(missing, found, strict=True):
                generation.cache.put(question, answer)
                answers[question] = answer
        return [answers[question] for question in questions]

    async def document(self, id: str) -> Document:
        """Raises RetrievalRefused where there is no document with this id, RetrievalUnavailable."""
        index = self._generation().index
        try:
            async with asyncio.timeout(self.options.batches.deadline_s):
                document = await asyncio.to_thread(index.find, id)
        except TimeoutError:
            raise RetrievalUnavailable("the document was not read in time", code="deadline") from None
        except Exception as error:
            log.error("document %r cannot be read", id, exc_info=error)
            raise RetrievalUnavailable(f"it cannot be read: {error!r}", code="search_failed") from error
        if document is None:
            raise RetrievalRefused(f"there is no document {id!r}", status=404, code=NO_DOCUMENT)
        return document

    # -- the index -------------------------------------------------------------------------------

    async def reload(self, directory: Path | None = None) -> int:
        """Open an index and answer from it from now on; what was asked before is answered from the old one.

        Returns its number of documents, when the old index has nothing to answer any more.
        Raises RetrievalRefused where it cannot be opened: then nothing changes.
        """
        async with self._exchange:
            old = self._generation()
            where = directory or self.options.directory
            try:
                index = await asyncio.to_thread(self._open_index, where, self.options)
                _mode(index, self.options.mode)
            except Exception as error:
                raise RetrievalRefused(
                    f"{where} cannot be opened, and the index in use stays: {error}", code="bad_index"
                ) from error
            self._current = self._use(index)
            self.metrics.reloads += 1
            await old.batcher.drain()
            return len(index)

    async def _load(self) -> None:
        directory = self.options.directory
        try:
            index = await asyncio.to_thread(self._open_index, directory, self.options)
            _mode(index, self.options.mode)
        except Exception as error:  # noqa: BLE001 - whoever runs the server is told
            self.failed = str(error) or repr(error)
            self._on_failure(self.failed)
            return
        self._current = self._use(index)
        log.info("%s: %d documents, ready", directory, len(index))

    def _use(self, index: Index) -> _LoadedIndex:
        return _LoadedIndex(index, self._executor, self.options, self.metrics)

    def _generation(self) -> _LoadedIndex:
        if self._current is None:
            why = f"the index cannot be opened: {self.failed}" if self.failed else "the index is being opened"
            raise RetrievalUnavailable(why, code="loading")
        return self._current

    def prometheus(self) -> str:
        """Everything that is counted."""
        families = list(self.metrics.families())
        if self._current is not None:
            families += [
                ("documents", "gauge", len(self._current.index), ""),
                ("cache_bytes", "gauge", self._current.cache.bytes, ""),
            ]
        families += [
            ("ready", "gauge", int(self.ready), ""),
            ("waiting_queries", "gauge", self.waiting, ""),
        ]
        return prometheus("tidegate_rag", families)


def _mode(index: Index, mode: str | None) -> str:
    """Raises RetrievalRefused for a way of searching that the index was not built for."""
    if mode is None:
        return index.modes[0]
    if mode not in index.modes:
        raise RetrievalRefused(
            f"mode: {mode!r} is none of {', '.join(index.modes)}, for which the index was built"
            + did_you_mean(mode, index.modes)
        )
    return mode


def _check(queries: Sequence[str], k: int, queue: int) -> None:
    """Raises RetrievalRefused for what no server would answer, however long one waits."""
    if not 1 <= k <= MAX_K:
        raise RetrievalRefused(f"k: {k} documents cannot be asked for; at least 1, at most {MAX_K}")
    many = "a request may be split"
    if len(queries) > queue:
        raise RetrievalRefused(
            f"{len(queries)} queries, of at most {queue}; {many}", status=413, code="too_many"
        )
    if len(queries) * k > MAX_DOCUMENTS:
        raise RetrievalRefused(
            f"{len(queries)} queries for {k} documents each, of at most {MAX_DOCUMENTS} together; {many}",
            status=413,
            code="too_many",
        )
    for place, query in enumerate(queries):
        if len(query) > MAX_QUERY:
            raise RetrievalRefused(
                f"query {place} has {len(query)} characters, of at most {MAX_QUERY}",
                status=413,
                code="query_too_long",
            )
