"""Client of retrieval servers, for agents and environments.

    client = SearchClient(["http://127.0.0.1:8100", "http://127.0.0.1:8101"])
    results = await client.search("who is the mayor of Larkfield", k=3)   # list[SearchResult], best first
    document = await client.document(results[0].id)                       # None if there is no such document

A call has one deadline. Connection failures, timeouts, 429 and 5xx are retried until then, on any server.
Then the call raises `RetrievalUnavailable`, an infrastructure failure. If a server refuses the request as
invalid, the call raises `RetrievalRefused` without a retry.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from tidegate.errors import ConfigError, RetrievalError, RetrievalRefused, RetrievalUnavailable
from tidegate.rag.corpus.corpus import Document
from tidegate.service.http_client import HttpClient, error_in

RAG_KEY = "TIDEGATE_RAG_KEY"
"""Environment variable with the key of a retrieval server."""
NO_DOCUMENT = "no_such_document"
"""Error code of a 404 for a document that the corpus does not have."""
NOT_TEXT = "not_text"
"""Error code for a string with half of a surrogate pair, which a model may write in JSON."""
ID_TOO_LONG = "id_too_long"
SEARCH_S = 30.0
_MAX_ID_BYTES = 16_384
"""Maximum bytes of an id in a URL; servers accept URLs of 64 kB."""
_FIRST_COOLDOWN_S, _MAX_COOLDOWN_S = 0.1, 5.0
_MIN_ATTEMPT_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchResult(Document):
    """A document found by a search. Scores are comparable within one search only; higher is better."""

    score: float


class SearchClient(HttpClient):
    """Client of one or several retrieval servers with the same index; calls the least busy one.

    It belongs to the event loop in which it is first used. `aclose` (or `async with`) closes its connections.

    Args:
        urls: Base URLs of the servers.
        api_key: Key of the servers, or None.
        timeout_s: Deadline of a call in seconds, retries included.

    Raises:
        ConfigError: There is no URL, or one is not an HTTP URL.
    """

    def __init__(
        self, urls: str | Sequence[str], api_key: str | None = None, timeout_s: float = SEARCH_S
    ) -> None:
        super().__init__(api_key)
        self._servers = _Servers([urls] if isinstance(urls, str) else urls)
        self._timeout_s = timeout_s

    async def aclose(self) -> None:
        """Closes the connections."""
        await self.close()

    @overload
    async def search(
        self, query: str, k: int | None = None, mode: str | None = None
    ) -> list[SearchResult]: ...
    @overload
    async def search(
        self, query: list[str] | tuple[str, ...], k: int | None = None, mode: str | None = None
    ) -> list[list[SearchResult]]: ...
    async def search(
        self, query: str | list[str] | tuple[str, ...], k: int | None = None, mode: str | None = None
    ) -> list[SearchResult] | list[list[SearchResult]]:
        """Searches for documents.

        Args:
            query: One query, or a list of queries. An empty query has no results.
            k: Maximum number of documents per query; None for the server's default.
            mode: `dense`, `bm25` or `hybrid`, if the index has it; None for the server's default.

        Returns:
            The documents, best first; for a list of queries one such list per query, in order.

        Raises:
            RetrievalUnavailable: No server answered before the deadline.
            RetrievalRefused: A server refused the request as invalid.
        """
        queries = [query] if isinstance(query, str) else list(query)
        for text in queries:
            _check_text(text)
        fields = {"queries": queries, "k": k, "mode": mode}
        body = orjson.dumps({name: value for name, value in fields.items() if value is not None})
        results = await self._call("POST", "/v1/search", body, lambda reply: _results(reply, len(queries)))
        return results[0] if isinstance(query, str) else results

    async def document(self, id: str) -> Document | None:
        """Returns the document with this id, or None if the corpus has none.

        Raises:
            RetrievalUnavailable: No server answered before the deadline.
            RetrievalRefused: A server refused the request as invalid.
        """
        try:
            return await self._call("GET", f"/v1/documents/{_quote_id(id)}", None, _document)
        except RetrievalRefused as refused:
            if refused.code == NO_DOCUMENT:
                return None
            raise

    async def _call(self, method: str, path: str, body: bytes | None, read: Callable[[Any], T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        attempts, last_error = 0, ""
        while True:
            now = time.monotonic()
            server, cooldown_s = self._servers.next(now)
            if now + cooldown_s >= deadline and attempts:
                raise RetrievalUnavailable(
                    f"no retrieval server answered within {self._timeout_s:g} s ({attempts} attempts); "
                    f"last error: {last_error}"
                )
            if 0 < cooldown_s < deadline - now:
                await asyncio.sleep(cooldown_s)
                continue
            if cooldown_s > 0:  # every cooldown ends after the deadline: make one attempt anyway
                await asyncio.sleep((deadline - now) / 2)
            # An attempt that times out must leave time for another one.
            left = deadline - time.monotonic()
            limit = max(left / 2, min(left, _MIN_ATTEMPT_S))
            attempts += 1
            try:
                return await self._attempt(server, method, path, body, read, limit)
            except RetrievalUnavailable as error:
                last_error = str(error)

    async def _attempt(
        self, server: _Server, method: str, path: str, body: bytes | None, read: Callable[[Any], T],
        limit_s: float,
    ) -> T:  # fmt: skip
        began = time.monotonic()
        server.busy += 1
        try:
            async with asyncio.timeout(limit_s):
                result = read(await self._request(server.url, method, path, body))
        except TimeoutError:
            why = f"{server.url} did not answer within {limit_s:.1f} s"
        except (aiohttp.ClientError, OSError) as error:
            why = f"{server.url} cannot be reached: {error or type(error).__name__}"
        except RetrievalRefused:
            server.succeeded()
            raise
        except RetrievalUnavailable as error:
            why = f"{server.url} failed: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{server.url} returned an invalid answer: {error!r}"
        else:
            server.succeeded()
            return result
        finally:
            server.busy -= 1
        server.failed(began, time.monotonic())
        raise RetrievalUnavailable(why)

    async def _request(self, url: str, method: str, path: str, body: bytes | None) -> Any:
        # The path is already quoted; requoting would turn an id like ".." into a path segment.
        status, content = await self._send(method, URL(url + path, encoded=True), body)
        if status >= 400:
            raise _error(status, content)
        return orjson.loads(content)


@dataclass(slots=True)
class _Server:
    """One server; times are in seconds on the caller's clock."""

    url: str
    busy: int = 0
    """Calls in progress."""
    failures: int = 0
    """Consecutive failures."""
    cooldown_until: float = 0.0

    def succeeded(self) -> None:
        self.failures, self.cooldown_until = 0, 0.0

    def failed(self, began: float, now: float) -> None:
        """Records the failure of a call that began at `began`; the cooldown doubles with each failure.

        Calls that ran at the same time count as one failure.
        """
        if began < self.cooldown_until:
            return
        self.failures += 1
        longest = min(_MAX_COOLDOWN_S, _FIRST_COOLDOWN_S * 2 ** (self.failures - 1))
        self.cooldown_until = now + longest * random.uniform(0.5, 1.0)


class _Servers:
    """The servers of one client, at least one."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ConfigError("a search client needs the URL of at least one server")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"{url!r} is not a retrieval server's URL: it must begin with http:// or https://"
                )
        self._servers = [_Server(url.rstrip("/")) for url in dict.fromkeys(urls)]

    def next(self, now: float) -> tuple[_Server, float]:
        """Returns the least busy server without a cooldown, and 0; or that with the shortest cooldown, and
        the seconds to wait for it (with jitter, so that clients do not retry at the same time)."""
        available = [server for server in self._servers if server.cooldown_until <= now]
        if available:
            least = min(server.busy for server in available)
            return random.choice([server for server in available if server.busy == least]), 0.0
        soonest = min(self._servers, key=lambda server: server.cooldown_until)
        return soonest, (soonest.cooldown_until - now) * random.uniform(1.0, 1.5)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RetrievalRefused(
            f"{text[:80]!r} is not valid text: it contains half of a surrogate pair", code=NOT_TEXT
        ) from None


def _quote_id(id: str) -> str:
    """Quotes an id as one path segment, dots included, because "." and ".." have a meaning in paths."""
    _check_text(id)
    quoted = quote(id, safe="").replace(".", "%2E")
    if len(quoted) > _MAX_ID_BYTES:
        raise RetrievalRefused(
            f"the id has {len(quoted)} bytes when quoted, and the limit is {_MAX_ID_BYTES}",
            status=414,
            code=ID_TOO_LONG,
        )
    return quoted


def _results(reply: Any, queries: int) -> list[list[SearchResult]]:
    """Parses search results. Raises ValueError, KeyError or TypeError for an invalid answer."""
    results = [[_result(row) for row in _list(rows)] for rows in _list(reply["results"])]
    if len(results) != queries:
        raise ValueError(f"{len(results)} results for {queries} queries")
    return results


def _result(row: Any) -> SearchResult:
    document, score = _document(row), float(row["score"])
    if not math.isfinite(score):
        raise ValueError(f"the document {document.id!r} has the score {score}")
    return SearchResult(document.id, document.title, document.text, score)


def _document(reply: Any) -> Document:
    fields = [reply["id"], reply["title"], reply["text"]]
    if not all(isinstance(field, str) for field in fields):
        raise TypeError(f"a document's id, title and text must be strings, not {fields!r:.80}")
    return Document(*fields)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {value!r:.80}")
    return value


def _error(status: int, content: bytes) -> RetrievalError:
    error = error_in(content)
    message = str(error.get("message", f"{status}: {content[:200].decode(errors='replace')}"))
    code = str(error.get("code", "unknown"))
    if status in (408, 429) or status >= 500:
        return RetrievalUnavailable(message, status=status, code=code)
    return RetrievalRefused(message, status=status, code=code)
