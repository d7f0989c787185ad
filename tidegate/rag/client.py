"""Clients of retrieval servers, for agents and environments.

    client = SearchClient(["http://127.0.0.1:8100", "http://127.0.0.1:8101"])
    found = await client.search("who is the mayor of Larkfield", k=3)     # list[Found], best first
    document = await client.document(found[0].id)                         # None where there is none

A search has one deadline. Until then it is tried again wherever a server may answer: connections that fail
or stall, 429 and 5xx are nobody's answer. What then remains is `RetrievalUnavailable`, an infrastructure
failure; a request that a server refuses as wrong is `RetrievalRefused`, and is not tried again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, overload
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from tidegate.errors import RetrievalError, RetrievalRefused, RetrievalUnavailable
from tidegate.rag.corpus.corpus import Document
from tidegate.rag.endpoints import RagEndpoint, RagEndpoints

RAG_KEY = "TIDEGATE_RAG_KEY"
"""The environment variable in which a retrieval server is given its key."""
NO_DOCUMENT = "no_such_document"
"""The code of the 404 that says that a corpus has no such document."""
NOT_TEXT = "not_text"
"""The code of a refusal: half of a surrogate pair, which a model may write in JSON, is no text."""
ID_TOO_LONG = "id_too_long"
SEARCH_S = 30.0
_LONGEST_ID = 16_384
"""Bytes of an id in an address; servers take 64 kB of it."""
_CONNECT_S = 5.0
_LEAST_TRY_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A document that a search found; a higher `score` is better, within one search."""

    id: str
    title: str
    text: str
    score: float


class SearchClient:
    """Asks the least busy of several equal servers; `timeout_s` is the deadline of a whole call.

    It belongs to the event loop in which it is first used; `aclose` (or `async with`) frees its connections.
    """

    def __init__(
        self, urls: str | Sequence[str], api_key: str | None = None, timeout_s: float = SEARCH_S
    ) -> None:
        self._servers = RagEndpoints([urls] if isinstance(urls, str) else urls)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

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
        """The best `k` documents (None: the server's default), best first; fewer where there are fewer.

        For several queries a list for each, in their order. `mode` is `dense`, `bm25` or `hybrid`, as the
        server has it (None: its default). An empty query finds nothing.
        Raises RetrievalUnavailable, RetrievalRefused.
        """
        queries = [query] if isinstance(query, str) else list(query)
        for one in queries:
            _check_text(one)
        asked = {"queries": queries, "k": k, "mode": mode}
        body = orjson.dumps({name: value for name, value in asked.items() if value is not None})
        results = await self._call("POST", "/v1/search", body, lambda answer: _found(answer, len(queries)))
        return results[0] if isinstance(query, str) else results

    async def document(self, id: str) -> Document | None:
        """The document with this id; None where the corpus has none.

        Raises RetrievalUnavailable, RetrievalRefused.
        """
        try:
            return await self._call("GET", f"/v1/documents/{_in_address(id)}", None, _document)
        except RetrievalRefused as refused:
            if refused.code == NO_DOCUMENT:
                return None
            raise

    async def _call(self, method: str, path: str, body: bytes | None, read: Callable[[Any], T]) -> T:
        """Try until somebody answers or the deadline passes."""
        deadline = time.monotonic() + self._timeout_s
        tries, last = 0, "nobody was asked"
        while True:
            now = time.monotonic()
            server, rest_s = self._servers.next(now)
            if now + rest_s >= deadline and tries:
                raise RetrievalUnavailable(
                    f"no retrieval server answered within {self._timeout_s:g} s ({tries} tries), "
                    f"the last one: {last}"
                )
            if 0 < rest_s < deadline - now:
                await asyncio.sleep(rest_s)
                continue
            if rest_s > 0:  # all rest for longer than this call may take: one is asked all the same
                await asyncio.sleep((deadline - now) / 2)
            # A server that is silent must leave time for another try, there or elsewhere.
            left = deadline - time.monotonic()
            limit = max(left / 2, min(left, _LEAST_TRY_S))
            tries += 1
            try:
                return await self._try(server, method, path, body, read, limit)
            except RetrievalUnavailable as error:
                last = str(error)

    async def _try(
        self,
        server: RagEndpoint,
        method: str,
        path: str,
        body: bytes | None,
        read: Callable[[Any], T],
        limit_s: float,
    ) -> T:
        """One call to one server, which is told apart afterwards by how it went."""
        began = time.monotonic()
        server.busy += 1
        try:
            async with asyncio.timeout(limit_s):
                result = read(await self._once(server.url, method, path, body))
        except TimeoutError:
            why = f"{server.url} was silent for {limit_s:.1f} s"
        except (aiohttp.ClientError, OSError) as error:
            why = f"{server.url} cannot be reached: {error or type(error).__name__}"
        except RetrievalRefused:
            server.succeeded()
            raise
        except RetrievalUnavailable as error:
            why = f"{server.url} says: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{server.url} answered nonsense: {error!r}"
        else:
            server.succeeded()
            return result
        finally:
            server.busy -= 1
        server.failed(began, time.monotonic())
        raise RetrievalUnavailable(why)

    async def _once(self, url: str, method: str, path: str, body: bytes | None) -> Any:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        headers = {"Content-Type": "application/json"}
        # The path is quoted already; to be quoted again would make a path of an id like "..".
        address = URL(url + path, encoded=True)
        async with self._http.request(method, address, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status >= 400:
                raise _refusal(response.status, answer)
            return orjson.loads(answer)


def _check_text(text: str) -> None:
    """Raises RetrievalRefused for what no server can be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RetrievalRefused(
            f"{text[:80]!r} is no text: it holds half of a surrogate pair", code=NOT_TEXT
        ) from None


def _in_address(id: str) -> str:
    """An id as one part of a path, dots too: "." and ".." mean something else there."""
    _check_text(id)
    quoted = quote(id, safe="").replace(".", "%2E")
    if len(quoted) > _LONGEST_ID:
        raise RetrievalRefused(
            f"an id of {len(quoted)} bytes, of at most {_LONGEST_ID}", status=414, code=ID_TOO_LONG
        )
    return quoted


def _found(answer: Any, queries: int) -> list[list[SearchResult]]:
    """Raises ValueError, KeyError, TypeError for what is no answer: nonsense is not an empty result."""
    results = [[_row(row) for row in _list(rows)] for rows in _list(answer["results"])]
    if len(results) != queries:
        raise ValueError(f"{len(results)} results for {queries} queries")
    return results


def _row(row: Any) -> SearchResult:
    document, score = _document(row), float(row["score"])
    if not math.isfinite(score):
        raise ValueError(f"the document {document.id!r} has the score {score}")
    return SearchResult(document.id, document.title, document.text, score)


def _document(answer: Any) -> Document:
    fields = [answer["id"], answer["title"], answer["text"]]
    if not all(isinstance(one, str) for one in fields):
        raise TypeError(f"a document's id, title and text are texts, not {fields!r:.80}")
    return Document(*fields)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {value!r:.80}")
    return value


def _refusal(status: int, answer: bytes) -> RetrievalError:
    try:
        error = orjson.loads(answer)["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError):
        message, code = f"{status}: {answer[:200].decode(errors='replace')}", "unknown"
    if status in (408, 429) or status >= 500:
        return RetrievalUnavailable(message, status=status, code=code)
    return RetrievalRefused(message, status=status, code=code)
