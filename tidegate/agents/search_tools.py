"""The tools of one search episode: `search` and `open`, what is wrong with a call, and what they cost."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from tidegate.agents.refine import Refiner
from tidegate.errors import RetrievalRefused, RetrievalUnavailable
from tidegate.rag.client import ID_TOO_LONG, NOT_TEXT, SearchClient, SearchResult

MAX_PASSAGE = 2_000
"""Characters that a search shows of one document."""
MAX_DOCUMENT = 20_000
"""Characters that `open` shows."""
LEAST = 40
"""Results of fewer characters are none: then the context is full."""
LEAST_S, MARGIN_S = 2.0, 0.5
T = TypeVar("T")
FULL = "error: the context is full; give the answer now"
_OF_THE_CALL = (NOT_TEXT, ID_TOO_LONG, "query_too_long")
"""Refusals that the model's own words brought on. What else is refused (a key, a route, `k`) is a mistake in
the agent's options, and ends the run as such: told to the model, it would be learned from."""


def _tool(name: str, what: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


SEARCH = _tool("search", "Find the documents that fit a query best.", "query")
OPEN = _tool("open", "Read a whole document, by the id that a search has shown.", "id")


def offered(open: bool) -> list[Any]:
    """The tools as the model is told of them."""
    return [SEARCH, OPEN] if open else [SEARCH]


class SearchTools:
    """Answers one episode's calls. `room` is how many characters of results still fit, None: any."""

    def __init__(
        self, client: SearchClient, k: int, tools: Sequence[Any], question: str, refiner: Refiner | None
    ) -> None:
        self.room: int | None = None
        self.full = False
        self.left_s: Callable[[], float] = lambda: math.inf
        """Seconds until the episode's deadline."""
        self.metrics = dict.fromkeys(
            ("searches", "opens", "tool_errors", "duplicate_queries", "cut_results"), 0.0
        )
        self._client = client
        self._k = k
        self._arguments = {
            tool["function"]["name"]: tool["function"]["parameters"]["required"][0] for tool in tools
        }
        self._question = question
        self._refiner = refiner
        self._asked: set[str] = set()

    async def use(self, call: Any) -> str:
        """The result of a call; whatever is wrong with it goes back to the model in words.

        Raises RetrievalError where a service fails, or refuses what the model has no part in: that is no
        result.
        """
        name = call.function.name if call.type == "function" else call.type
        if name not in self._arguments:
            known = " and ".join(f"{tool}({argument})" for tool, argument in self._arguments.items())
            return self.error(f"error: there is no tool {str(name)[:80]!r}; there is {known}")
        argument = _argument(call.function.arguments, self._arguments[name])
        if argument is None:
            wanted = self._arguments[name]
            return self.error(
                f'error: the arguments must be {{"{wanted}": "..."}} with a text that is not empty'
            )
        if self.room is not None and self.room < LEAST:
            self.full = True
            return self.error(FULL)
        return self._fitted(await (self._open(argument) if name == "open" else self._search(argument)))

    def error(self, text: str) -> str:
        self.metrics["tool_errors"] += 1
        return text

    async def _search(self, query: str) -> str:
        self.metrics["searches"] += 1
        plain = " ".join(query.lower().split())
        if plain in self._asked:
            self.metrics["duplicate_queries"] += 1
            return "note: this query was made before; its results are above. Ask something else, or answer"
        self._asked.add(plain)
        try:
            found = await self._in_time(self._client.search(query, self._k))
        except RetrievalRefused as error:
            if error.code not in _OF_THE_CALL:
                raise
            return self.error(f"error: the search refuses this query: {error}")
        text = "\n".join(self._shown(one) for one in found) or "note: nothing was found"
        if self._refiner is None or not found:
            return text
        began = time.monotonic()
        text = await self._refiner.refine(self._question, query, text)
        self.metrics["refine_seconds"] = self.metrics.get("refine_seconds", 0.0) + time.monotonic() - began
        return text

    async def _open(self, id: str) -> str:
        self.metrics["opens"] += 1
        try:
            document = await self._in_time(self._client.document(id))
        except RetrievalRefused as error:
            if error.code not in _OF_THE_CALL:
                raise
            document = None
        if document is None:
            return self.error(f"error: there is no document {id[:80]!r}; ids are those that a search shows")
        return _cut(_whole(document.title, document.text), MAX_DOCUMENT, "… (the document goes on)")

    async def _in_time(self, answer: Awaitable[T]) -> T:
        """Raises RetrievalUnavailable shortly before the episode's deadline, where servers had seconds to
        answer: then the episode ends `infra_error`, and not as the policy's timeout."""
        left = self.left_s()
        if left < LEAST_S:
            return await answer
        limit = None if math.isinf(left) else left - MARGIN_S
        try:
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            raise RetrievalUnavailable(
                f"no retrieval server answered within {limit:.1f} s, before the episode's deadline"
            ) from None

    def _shown(self, found: SearchResult) -> str:
        """A document in a list of results; its id is shown where it can be opened."""
        text = _cut(
            _whole(found.title, found.text),
            MAX_PASSAGE,
            "… (open it to read on)" if "open" in self._arguments else "…",
        )
        return f"[{found.id}] {text}" if "open" in self._arguments else text

    def _fitted(self, text: str) -> str:
        """As much of a result as there is room for, which it takes."""
        if self.room is None:
            return text
        if len(text) > self.room:
            self.metrics["cut_results"] += 1
            text = _cut(text, self.room, "… (cut: the context is full)")
        self.room -= len(text)
        return text


def _argument(arguments: str, name: str) -> str | None:
    """A call's one argument; None where it is missing, no text, or empty."""
    try:
        given = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    value = given.get(name) if isinstance(given, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


def _whole(title: str, text: str) -> str:
    """Title and text; a text that begins with its title doesn't repeat it."""
    return text if not title or text.startswith(title) else f"{title}\n{text}"


def _cut(text: str, limit: int, mark: str) -> str:
    return text if len(text) <= limit else text[: max(0, limit - len(mark))] + mark
