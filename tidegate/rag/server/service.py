"""The service of a retrieval server: answers queries from an index that can be reloaded meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from tidegate.errors import ConfigError, RetrievalRefused, RetrievalUnavailable
from tidegate.loading import did_you_mean
from tidegate.prometheus import gauge, metrics_of
from tidegate.rag.client import NO_DOCUMENT, SearchResult
from tidegate.rag.corpus.corpus import Document
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.server.batcher import BatchOptions, QueryBatcher
from tidegate.rag.server.metrics import PREFIX, RetrievalMetrics
from tidegate.rag.server.query import Cache, Query, answer_all

log = logging.getLogger("tidegate.rag")

MAX_K = 1000
MAX_DOCUMENTS = 65_536
"""Maximum documents in the answer to one request."""
MAX_QUERY = 32_768
"""Maximum characters of a query, which is more than encoders read."""
_STALL_S = 120.0
"""Duration of a batch after which `/health` reports a stall."""


@dataclass(frozen=True, slots=True)
class RagOptions:
    """Options of a retrieval server."""

    directory: Path
    """Directory of an index built by `tidegate rag build`."""
    mode: str | None = None
    """Default search mode; None for the first mode of the index."""
    k: int = 5
    """Default number of documents per query."""
    threads: int = 1
    """Threads of one search."""
    device: str = "cpu"
    """Device of the encoder."""
    encoder: str | None = None
    """Location of the encoder's model, if it has moved since the index was built."""
    batches: BatchOptions = field(default_factory=BatchOptions)
    cache_bytes: int = 64 * 2**20
    _: KW_ONLY
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_K:
            raise ConfigError(f"k = {self.k}: it must be at least 1 and at most {MAX_K}")
        if self.threads < 1 or self.cache_bytes < 0:
            raise ConfigError(
                f"threads = {self.threads}, cache_bytes = {self.cache_bytes}: at least 1 thread and 0 "
                "bytes are needed"
            )


def open_searcher(directory: Path, options: RagOptions) -> Searcher:
    """Opens an index, and logs its type and recall, with a warning if the recall is below its target."""
    searcher = Searcher(directory, threads=options.threads, device=options.device, encoder=options.encoder)
    vectors = searcher.manifest.index
    what = "no vectors" if vectors is None else vectors.summary
    log.info("%s: %d documents, %s", directory, len(searcher), what)
    if vectors is not None and vectors.warning is not None:
        log.warning("%s: %s", directory, vectors.warning)
    return searcher


class _LoadedIndex:
    """An index in use, with its own batcher and cache."""

    def __init__(
        self, index: Searcher, executor: ThreadPoolExecutor, options: RagOptions, metrics: RetrievalMetrics
    ) -> None:
        self.index = index
        self.cache = Cache(options.cache_bytes)
        self.batcher = QueryBatcher(
            lambda queries: answer_all(index, queries), executor, options.batches, metrics
        )


class Retrieval:
    """Opens an index with `open_index(directory, options)` in a thread, and answers queries from it.

    `start` returns before the index is open; until then queries fail with the code `loading`. `on_failure` is
    called with the reason if the index cannot be opened.
    """

    def __init__(
        self,
        options: RagOptions,
        open_index: Callable[[Path, RagOptions], Searcher] = open_searcher,
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
        """Number of queries with a waiting caller."""
        return 0 if self._current is None else self._current.batcher.waiting

    @property
    def method(self) -> str:
        return _mode(self._loaded().index, self.options.mode)

    @property
    def health_error(self) -> str | None:
        """The error that only a restart of the process can resolve, or None."""
        if self.failed is not None or self._current is None:
            return self.failed
        batcher = self._current.batcher
        if batcher.running_since is not None and time.monotonic() - batcher.running_since > _STALL_S:
            return f"a search has been running for {time.monotonic() - batcher.running_since:.0f} s"
        return batcher.failed

    # -- queries ---------------------------------------------------------------------------------

    async def search(
        self, queries: Sequence[str], k: int | None = None, mode: str | None = None
    ) -> list[list[SearchResult]]:
        """Returns the best `k` documents of each query, best first, all from the same index.

        An empty query has no results. Raises RetrievalRefused, RetrievalUnavailable.
        """
        loaded = self._loaded()
        k = self.options.k if k is None else k
        mode = _mode(loaded.index, mode or self.options.mode)
        _check(queries, k, self.options.batches.queue)
        self.metrics.queries += len(queries)
        searches = [Query(query, k, mode) for query in queries]
        answers: dict[Query, list[SearchResult]] = {}
        missing = []
        for search in dict.fromkeys(searches):
            cached = loaded.cache.get(search)
            if not search.query.strip():
                answers[search] = []
            elif cached is not None:
                answers[search] = cached
                self.metrics.cache_hits += 1
            else:
                missing.append(search)
        if missing:
            for search, answer in zip(missing, await loaded.batcher.answer(missing), strict=True):
                loaded.cache.put(search, answer)
                answers[search] = answer
        return [answers[search] for search in searches]

    async def document(self, id: str) -> Document:
        """Returns a document. Raises RetrievalRefused if there is none with this id, RetrievalUnavailable."""
        index = self._loaded().index
        try:
            async with asyncio.timeout(self.options.batches.deadline_s):
                document = await asyncio.to_thread(index.find, id)
        except TimeoutError:
            raise RetrievalUnavailable(
                f"the document was not read within {self.options.batches.deadline_s:g} s", code="deadline"
            ) from None
        except Exception as error:
            log.error("document %r cannot be read", id, exc_info=error)
            raise RetrievalUnavailable(
                f"the document {id!r} cannot be read: {error!r}", code="search_failed"
            ) from error
        if document is None:
            raise RetrievalRefused(f"there is no document {id!r}", status=404, code=NO_DOCUMENT)
        return document

    # -- the index -------------------------------------------------------------------------------

    async def reload(self, directory: Path | None = None) -> int:
        """Opens an index and answers new queries from it; earlier queries are answered from the old index.

        Returns the number of documents of the new index, once the old one has no queries left.
        Raises RetrievalRefused if the index cannot be opened; the old index then stays in use.
        """
        async with self._exchange:
            old = self._loaded()
            directory = directory or self.options.directory
            try:
                new = await self._opened(directory)
            except Exception as error:
                raise RetrievalRefused(
                    f"{directory} cannot be opened, so the index in use stays: {error}", code="bad_index"
                ) from error
            self._current = new
            self.metrics.reloads += 1
            await old.batcher.drain()
            return len(new.index)

    async def _load(self) -> None:
        try:
            self._current = await self._opened(self.options.directory)
        except Exception as error:  # noqa: BLE001 - passed to on_failure
            self.failed = str(error) or repr(error)
            self._on_failure(self.failed)
            return

    async def _opened(self, directory: Path) -> _LoadedIndex:
        index = await asyncio.to_thread(self._open_index, directory, self.options)
        _mode(index, self.options.mode)
        return _LoadedIndex(index, self._executor, self.options, self.metrics)

    @property
    def info(self) -> dict[str, Any]:
        """The index in use, as `Searcher.info`. Raises RetrievalUnavailable until it is open."""
        return self._loaded().index.info

    def _loaded(self) -> _LoadedIndex:
        if self._current is None:
            why = f"the index cannot be opened: {self.failed}" if self.failed else "the index is being opened"
            raise RetrievalUnavailable(why, code="loading")
        return self._current

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for Prometheus."""
        yield from metrics_of(PREFIX, self.metrics)
        if self._current is not None:
            yield gauge(f"{PREFIX}_documents", len(self._current.index))
            yield gauge(f"{PREFIX}_cache_bytes", self._current.cache.bytes)
        yield gauge(f"{PREFIX}_ready", self.ready)
        yield gauge(f"{PREFIX}_waiting_queries", self.waiting)


def _mode(index: Searcher, mode: str | None) -> str:
    if mode is None:
        return index.modes[0]
    if mode not in index.modes:
        raise RetrievalRefused(
            f"mode = {mode!r}: it must be one of {', '.join(index.modes)}" + did_you_mean(mode, index.modes)
        )
    return mode


def _check(queries: Sequence[str], k: int, queue: int) -> None:
    if not 1 <= k <= MAX_K:
        raise RetrievalRefused(f"k = {k}: it must be between 1 and {MAX_K}")
    advice = "split the request"
    if len(queries) > queue:
        raise RetrievalRefused(
            f"{len(queries)} queries, and the limit is {queue}; {advice}", status=413, code="too_many"
        )
    if len(queries) * k > MAX_DOCUMENTS:
        raise RetrievalRefused(
            f"{len(queries)} queries for {k} documents, and the limit is {MAX_DOCUMENTS} in all; {advice}",
            status=413,
            code="too_many",
        )
    for index, query in enumerate(queries):
        if len(query) > MAX_QUERY:
            raise RetrievalRefused(
                f"query {index} has {len(query)} characters, and the limit is {MAX_QUERY}",
                status=413,
                code="query_too_long",
            )
