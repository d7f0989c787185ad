"""A search agent: the model searches and opens documents until it answers, on the plain `openai` SDK."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.agents.refine import Refiner
from tidegate.agents.search_tools import SearchTools, offered
from tidegate.errors import ConfigError
from tidegate.loading import construct
from tidegate.rag.client import SearchClient
from tidegate.types import TaskView

CHARACTERS_A_TOKEN = 4
"""Where an endpoint doesn't say how many tokens it used."""
UNREAD = "error: the tool call could not be read; it is one JSON object with a name and arguments"


class SearchAgent(Agent):
    """Answers questions from a corpus.

    `urls`: retrieval servers (`tidegate rag serve`); `api_key_env` names the variable with their key.
    `k`: documents a search gives; `open`: whether whole documents can be opened by their id, which results
    then show. `max_turns`: replies of the model. `context_tokens`: what the conversation may come to;
    results are cut to what is left of it, and a full one is told to the model, which then has one reply.
    `instructions` go before the task as a system message. `refine`: options of a `Refiner`, a second model
    that condenses what a search found. A retrieval or refine service that fails ends the run as
    `infra_error`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        k: int = 3,
        open: bool = True,
        max_turns: int = 8,
        context_tokens: int | None = None,
        instructions: str | None = None,
        refine: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise ConfigError("search agent: urls is a list of retrieval servers, at least one")
        if k < 1 or max_turns < 1:
            raise ConfigError(f"search agent: k = {k} and max_turns = {max_turns} must be at least 1")
        self._k = k
        self._tools = offered(open)
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
            if unread:  # servers leave a call that they cannot read in the text
                messages.append({"role": "user", "content": tools.error(UNREAD)})
                continue
            texts = await together(tools.use(call) for call in calls)
            for call, text in zip(calls, texts, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return Result(content, metrics={"turns": float(turns), **tools.metrics})

    async def aclose(self) -> None:
        """Close the connections; a process that ends needs no such thing."""
        await self._client.aclose()

    def _room(self, messages: Sequence[Any], usage: Any) -> int | None:
        """Characters that are left for results; None where there is no limit."""
        if self._context_tokens is None:
            return None
        characters = sum(len(str(message)) for message in messages)
        used = usage.total_tokens if usage is not None else characters // CHARACTERS_A_TOKEN
        # What is left is counted in tokens; how many characters one has, the conversation itself says.
        return int((self._context_tokens - used) * characters / max(1, used))


async def together(calls: Iterable[Awaitable[str]]) -> list[str]:
    """The results of calls made at the same time; the first that fails ends the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def question_of(task: TaskView) -> str:
    """The text of the task's last message from the user."""
    said = [message["content"] for message in task.messages if message["role"] == "user"]
    return str(said[-1]) if said else ""


def _key(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"search agent: api_key_env = {variable!r}, but that variable is not set")
    return None if variable is None else os.environ[variable]
