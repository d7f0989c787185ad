"""The built-in agent `search`: the model searches and opens documents until it answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.agents.refine import Refiner
from tidegate.agents.search_tools import SearchTools, tool_definitions
from tidegate.errors import ConfigError
from tidegate.loading import construct
from tidegate.rag.client import SearchClient
from tidegate.types import TaskView

CHARACTERS_A_TOKEN = 4
"""Estimate for endpoints that do not report the number of tokens."""
UNREAD = "error: the tool call could not be read; it is one JSON object with a name and arguments"
"""Reply to a tool call that the server left in the text."""


class SearchAgent(Agent):
    """Answers questions from a corpus. A failure of the retrieval or refine service is an `infra_error`.

    Args:
        urls: Retrieval servers (`tidegate rag serve`).
        k: Documents per search.
        open: Whether the model can open whole documents by their id, which results then contain.
        max_turns: Limit of the model's replies.
        context_tokens: Limit of the conversation in tokens. Results are cut to fit; when the context is full,
            the model is informed and has one more reply.
        instructions: System message before the task.
        refine: Options of a `Refiner`, a second model that condenses search results.
        api_key_env: Environment variable with the retrieval servers' key.
        timeout_s: Timeout of a retrieval call.

    Raises:
        ConfigError: An option is invalid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        k: int = 3,
        *,
        open: bool = True,
        max_turns: int = 8,
        context_tokens: int | None = None,
        instructions: str | None = None,
        refine: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise ConfigError("search agent: urls must be a list of at least one retrieval server")
        if k < 1 or max_turns < 1:
            raise ConfigError(f"search agent: k = {k} and max_turns = {max_turns} must be at least 1")
        self._k = k
        self._tools = tool_definitions(open)
        self._max_turns = max_turns
        self._context_tokens = context_tokens
        self._instructions = instructions
        self._client = SearchClient(urls, api_key=_key(api_key_env), timeout_s=timeout_s)
        self._refiner = (
            None if refine is None else construct(Refiner, refine, "search agent's refine service")
        )

    async def run(self, task: TaskView, session: Session) -> Result:
        llm = session.openai()
        messages: list[Any] = [*task.messages]
        tools = SearchTools(self._client, self._k, self._tools, question_of(task), self._refiner)
        tools.left_s = session.remaining
        if self._instructions is not None:
            messages.insert(0, {"role": "system", "content": self._instructions})
        turns, content = 0, None
        while turns < self._max_turns:
            reply = await llm.chat.completions.create(
                model=session.model, messages=messages, tools=self._tools
            )
            message = reply.choices[0].message
            content = message.content
            turns += 1
            calls = message.tool_calls or []
            unread = not calls and "<tool_call>" in (content or "")
            if tools.full or not (calls or unread):
                break
            messages.append(message.model_dump(exclude_none=True))
            tools.room = self._room(messages, reply.usage)
            if unread:
                messages.append({"role": "user", "content": tools.error(UNREAD)})
                continue
            texts = await gather_or_cancel(tools.use(call) for call in calls)
            for call, text in zip(calls, texts, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return Result(content, metrics={"turns": float(turns), **tools.metrics})

    async def aclose(self) -> None:
        """Closes the connections; unnecessary if the process exits."""
        await self._client.aclose()

    def _room(self, messages: Sequence[Any], usage: Any) -> int | None:
        """Returns the characters left for results, None if there is no limit."""
        if self._context_tokens is None:
            return None
        characters = sum(len(str(message)) for message in messages)
        used = usage.total_tokens if usage is not None else characters // CHARACTERS_A_TOKEN
        # Converts the tokens left by the conversation's mean characters per token.
        return int((self._context_tokens - used) * characters / max(1, used))


async def gather_or_cancel(calls: Iterable[Awaitable[str]]) -> list[str]:
    """Returns the results of concurrent calls; cancels all and raises if one fails."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def question_of(task: TaskView) -> str:
    """Returns the text of the task's last user message."""
    texts = [message["content"] for message in task.messages if message["role"] == "user"]
    return str(texts[-1]) if texts else ""


def _key(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"search agent: api_key_env = {variable!r}, but that variable is not set")
    return None if variable is None else os.environ[variable]
