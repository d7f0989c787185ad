"""Tools of any MCP server for the tasks of another environment: `env.use = "mcp:https://host/mcp"`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any, ClassVar

from tidegate.envs.adapters.library import require, run_apart
from tidegate.envs.base import Environment, load_environment
from tidegate.envs.tools import NAME, Tool, ToolError
from tidegate.errors import ConfigError, TidegateError
from tidegate.loading import did_you_mean
from tidegate.service.http_client import refuse_redirect
from tidegate.types import Task, Trajectory

log = logging.getLogger(__name__)
STARTING_S = 30.0
"""Deadline of connecting to a server and of listing its tools."""


class McpServerError(TidegateError):
    """The MCP server cannot be started or reached."""


@dataclass
class McpConnection:
    """A client's session with a server; its own task opens and closes it, as the SDK demands."""

    server: str
    token_env: str | None
    opened: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def open(self) -> Any:
        """Returns the SDK's session. Raises McpServerError if there is none in time."""
        self.task = asyncio.create_task(self._run(), name=f"MCP {self.server}")
        try:
            async with asyncio.timeout(STARTING_S):
                return await asyncio.shield(self.opened)
        except Exception as error:
            await self.close()
            first = error
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            cause = str(first) or type(first).__name__
            raise McpServerError(f"the MCP server {self.server!r} cannot be used: {cause}") from error

    async def close(self) -> None:
        self.closing.set()
        if self.task is not None:
            done, late = await asyncio.wait([self.task], timeout=STARTING_S)
            for task in late:
                task.cancel()
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.warning("the MCP server %r ended with %r", self.server, error)

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._transport())
                session = require("mcp").ClientSession(*streams[:2])
                await stack.enter_async_context(session)
                await session.initialize()
                self.opened.set_result(session)
                await self.closing.wait()
        except Exception as error:
            if self.opened.done():
                raise
            self.opened.set_exception(error)

    def _transport(self) -> Any:
        if self.server.startswith(("http://", "https://")):
            http = require("mcp.client.streamable_http")
            key = os.environ.get(self.token_env or "")
            headers = {"Authorization": f"Bearer {key}"} if key else None
            client = http.create_mcp_http_client(headers=headers)
            client.event_hooks = {"response": [refuse_redirect]}
            return http.streamable_http_client(self.server, http_client=client)
        stdio = require("mcp.client.stdio")
        command, *arguments = shlex.split(self.server)
        server = stdio.StdioServerParameters(command=command, args=arguments)
        # Its default is what `sys.stderr` was at the import, which may have no file descriptor.
        return stdio.stdio_client(server, sys.__stderr__ or sys.stderr)


class McpTools(Environment):
    """Gives the tasks of another environment the tools of an MCP server. Each episode has its own connection.

    Args:
        id: Address of the server (streamable HTTP), or the command that starts it (stdio).
        tasks: Table `{use, options}` of the environment with the tasks and the rewards, which has no state.
        tools: Names of the tools that agents receive, as the server has them; None: all.
        timeout_s: Deadline of a tool call in seconds.
        token_env: Environment variable with the server's bearer token.

    Raises:
        ConfigError: The library is missing, the server cannot be used or lacks a tool, or `tasks` is invalid.
    """

    name: ClassVar[str] = "mcp"

    def __init__(
        self,
        id: str,
        tasks: Mapping[str, Any],
        tools: Sequence[str] | None = None,
        timeout_s: float = 60.0,
        token_env: str | None = None,
    ) -> None:
        require("mcp")
        if not isinstance(tasks, Mapping) or not isinstance(tasks.get("use"), str):
            raise ConfigError("mcp: the option 'tasks' must be a table {use, options} of an environment")
        self._server, self._timeout_s, self._token_env = id, timeout_s, token_env
        self._inner = load_environment(tasks["use"], tasks.get("options", {}))
        if self._inner.stateful or list(self._inner.rewarders()) != [self._inner.name]:
            raise ConfigError(f"mcp: the tasks of {tasks['use']!r} have a state or several parts")
        self.rewards = self._inner.rewards
        self.reward_limit_s = self._inner.reward_limit_s
        try:
            listed = run_apart(self._listed(), 2 * STARTING_S)
        except (McpServerError, TimeoutError) as error:
            raise ConfigError(str(error) or f"the MCP server {id!r} listed no tools in time") from error
        for tool in tools or ():
            if tool not in listed:
                raise ConfigError(f"the MCP server {id!r} has no tool {tool!r}{did_you_mean(tool, listed)}")
        names = _names(listed)
        self._tools = [
            Tool(names[name], one.get("description") or "", one["inputSchema"], partial(self._call, name))
            for name, one in listed.items()
            if tools is None or name in tools
        ]

    def train_task(self, index: int) -> Task:
        return replace(self._inner.train_task(index), env=self.name)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        sets = self._inner.eval_sets()
        return {name: [replace(task, env=self.name) for task in tasks] for name, tasks in sets.items()}

    def train_size(self) -> int | None:
        return self._inner.train_size()

    def gold_output(self, task: Task) -> str | None:
        return self._inner.gold_output(task)

    def turn_rewards(self, task: Task, trajectory: Trajectory) -> Mapping[int, float]:
        return self._inner.turn_rewards(task, trajectory)

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def setup(self, task: Task) -> McpConnection:
        connection = McpConnection(self._server, self._token_env)
        await connection.open()
        return connection

    async def teardown(self, state: McpConnection) -> None:
        await state.close()

    async def _listed(self) -> dict[str, dict[str, Any]]:
        """Returns the server's tools by name, as the protocol describes them."""
        request = require("mcp.types").PaginatedRequestParams
        connection = McpConnection(self._server, self._token_env)
        session = await connection.open()
        try:
            tools: dict[str, dict[str, Any]] = {}
            cursors: list[str] = []
            while True:
                params = request(cursor=cursors[-1]) if cursors else None
                page = (await session.list_tools(params=params)).model_dump(by_alias=True)
                tools |= {tool["name"]: tool for tool in page["tools"]}
                cursor = page.get("nextCursor")
                if not cursor:
                    return tools
                if cursor in cursors:
                    raise McpServerError(
                        f"the MCP server {self._server!r} lists its tools without end: it returned the "
                        f"cursor {cursor!r} twice"
                    )
                cursors.append(cursor)
        finally:
            await connection.close()

    async def _call(self, name: str, state: McpConnection, arguments: Mapping[str, Any]) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                result = (await state.opened.result().call_tool(name, dict(arguments))).model_dump(
                    by_alias=True
                )
        except TimeoutError:
            raise ToolError(f"the tool {name!r} did not answer within {self._timeout_s:g} s") from None
        except Exception as error:
            raise ToolError(f"the tool {name!r} failed: {error}") from error
        text = _text_of(result)
        if result.get("isError"):
            raise ToolError(text or f"the tool {name!r} failed and gave no reason")
        return text


def _names(listed: Collection[str]) -> dict[str, str]:
    """Returns the name under which agents call each of a server's tools: its own, or one with `_` in place of
    characters that the APIs of models refuse, such as dots."""
    names: dict[str, str] = {}
    for name in sorted(listed, key=lambda name: NAME.fullmatch(name) is None):  # correct names are kept
        plain = re.sub("[^A-Za-z0-9_-]", "_", name)[:64] or "_"
        candidates = chain([plain], (f"{plain[:60]}_{number}" for number in count(2)))
        names[name] = next(each for each in candidates if each not in names.values())
    return names


def _text_of(result: Mapping[str, Any]) -> str:
    """Returns the texts of a tool's result, and its structured value if they do not hold it."""
    texts = [text for part in result.get("content") or () if (text := _part_text(part)) is not None]
    structured = result.get("structuredContent")
    if structured is not None and not _repeats(texts, structured):
        texts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(texts)


def _part_text(part: Mapping[str, Any]) -> str | None:
    """Returns the text of a part; None for images, audio and other binary data."""
    match part["type"]:
        case "text":
            return str(part["text"])
        case "resource":
            resource: Mapping[str, Any] = part["resource"]
            return None if resource.get("text") is None else str(resource["text"])
        case "resource_link":
            about = [part.get("title") or part.get("name"), part.get("description")]
            return ": ".join([str(part["uri"]), *filter(None, about)])
    return None


def _repeats(texts: Sequence[str], structured: Any) -> bool:
    """Returns whether texts hold a structured value, as the protocol advises: its JSON, or the value that the
    server's SDK put into `{"result": …}`, in one part or a part for each item."""
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values.append(structured["result"])
    read = [_json(text) for text in texts]
    return any(
        value in texts or value in read or (bool(texts) and value in ([*texts], read)) for value in values
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
