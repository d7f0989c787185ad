"""The tools `search` and `open` of one search episode: their calls, errors and metrics."""

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
"""Characters of each document in search results."""
MAX_DOCUMENT = 20_000
"""Characters of a document that `open` returns."""
MIN_ROOM = 40
"""With room for fewer characters the context counts as full."""
MIN_WAIT_S, MARGIN_S = 2.0, 0.5
T = TypeVar("T")
FULL = "error: the context is full; give the answer now"
_MODEL_ERRORS = (NOT_TEXT, ID_TOO_LONG, "query_too_long")
"""Refusals caused by the model's arguments, which are returned to it. Others (of a key, a route, `k`) are
caused by the agent's options: the episode fails instead, so that the model is not trained on them."""


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


SEARCH = _tool("search", "Find the documents that fit a query best.", "query")
OPEN = _tool("open", "Read a whole document, by the id that a search has shown.", "id")


def tool_definitions(open: bool) -> list[Any]:
    """Returns the definitions for the request's `tools`."""
    return [SEARCH, OPEN] if open else [SEARCH]


class SearchTools:
    """Executes one episode's tool calls."""

    def __init__(
        self, client: SearchClient, k: int, tools: Sequence[Any], question: str, refiner: Refiner | None
    ) -> None:
        self.room: int | None = None
        """Characters of results that still fit; None: no limit."""
        self.full = False
        """Whether the model was informed that the context is full."""
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
        self._queries: set[str] = set()

    async def use(self, call: Any) -> str:
        """Returns the result of a call, or the text of an error that the model caused.

        Raises RetrievalError if the service fails or refuses the request for another reason.
        """
        name = call.function.name if call.type == "function" else call.type
        if name not in self._arguments:
            tools = " and ".join(f"{tool}({argument})" for tool, argument in self._arguments.items())
            return self.error(f"error: there is no tool {str(name)[:80]!r}; there is {tools}")
        parameter = self._arguments[name]
        argument = _argument(call.function.arguments, parameter)
        if argument is None:
            return self.error(
                f'error: the arguments must be {{"{parameter}": "..."}} with a text that is not empty'
            )
        if self.room is not None and self.room < MIN_ROOM:
            self.full = True
            return self.error(FULL)
        return self._fit(await (self._open(argument) if name == "open" else self._search(argument)))

    def error(self, text: str) -> str:
        """Counts an error of the model and returns its text."""
        self.metrics["tool_errors"] += 1
        return text

    async def _search(self, query: str) -> str:
        self.metrics["searches"] += 1
        normalised = " ".join(query.lower().split())
        if normalised in self._queries:
            self.metrics["duplicate_queries"] += 1
            return "note: this query was made before; its results are above. Ask something else, or answer"
        self._queries.add(normalised)
        try:
            results = await self._before_deadline(self._client.search(query, self._k))
        except RetrievalRefused as error:
            if error.code not in _MODEL_ERRORS:
                raise
            return self.error(f"error: the search refuses this query: {error}")
        text = "\n".join(self._format(result) for result in results) or "note: nothing was found"
        if self._refiner is None or not results:
            return text
        began = time.monotonic()
        text = await self._refiner.refine(self._question, query, text)
        self.metrics["refine_seconds"] = self.metrics.get("refine_seconds", 0.0) + time.monotonic() - began
        return text

    async def _open(self, id: str) -> str:
        self.metrics["opens"] += 1
        try:
            document = await self._before_deadline(self._client.document(id))
        except RetrievalRefused as error:
            if error.code not in _MODEL_ERRORS:
                raise
            document = None
        if document is None:
            return self.error(f"error: there is no document {id[:80]!r}; ids are those that a search shows")
        return _cut(_with_title(document.title, document.text), MAX_DOCUMENT, "… (the document goes on)")

    async def _before_deadline(self, response: Awaitable[T]) -> T:
        """Awaits a response until shortly before the episode's deadline.

        Raises RetrievalUnavailable if the servers had at least MIN_WAIT_S − MARGIN_S to respond: the episode
        then ends as `infra_error`, not as the policy's `timeout`.
        """
        left = self.left_s()
        if left < MIN_WAIT_S:
            return await response
        limit = None if math.isinf(left) else left - MARGIN_S
        try:
            async with asyncio.timeout(limit):
                return await response
        except TimeoutError:
            raise RetrievalUnavailable(
                f"no retrieval server answered within {limit:.1f} s, before the episode's deadline"
            ) from None

    def _format(self, result: SearchResult) -> str:
        """Formats one search result, with its id if the model can open documents."""
        text = _cut(
            _with_title(result.title, result.text),
            MAX_PASSAGE,
            "… (open it to read on)" if "open" in self._arguments else "…",
        )
        return f"[{result.id}] {text}" if "open" in self._arguments else text

    def _fit(self, text: str) -> str:
        """Cuts a result to the room that is left, and reduces the room."""
        if self.room is None:
            return text
        if len(text) > self.room:
            self.metrics["cut_results"] += 1
            text = _cut(text, self.room, "… (cut: the context is full)")
        self.room -= len(text)
        return text


def _argument(arguments: str, name: str) -> str | None:
    """Returns a call's argument as text, None if it is missing, of another type, or empty."""
    try:
        values = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    value = values.get(name) if isinstance(values, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


def _with_title(title: str, text: str) -> str:
    """Puts the title before the text unless the text begins with it."""
    return text if not title or text.startswith(title) else f"{title}\n{text}"


def _cut(text: str, limit: int, mark: str) -> str:
    return text if len(text) <= limit else text[: max(0, limit - len(mark))] + mark
