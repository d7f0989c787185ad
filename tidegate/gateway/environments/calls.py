"""Passes an agent's tool calls and replies to its environment, and records the tool calls."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tidegate.errors import GatewayError
from tidegate.gateway.environments.base import EpisodeLostError, Response, ToolResult
from tidegate.gateway.environments.states import EpisodeStates
from tidegate.gateway.errors import environment_failure
from tidegate.gateway.journal.base import Journal
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.session import GatewaySession, check_tool_calls
from tidegate.types import Message, ToolCall

T = TypeVar("T")
MAX_RESULT = 64 * 1024
"""Bytes of a tool's result that the agent receives."""
MAX_ARGUMENTS = 256 * 1024
"""Bytes of a tool call's arguments, or of a reply to the counterpart."""
_SHOWN = 64
"""Characters of an unknown tool's name in messages."""
UNKNOWN = "unknown"
"""Label of tools that the environment does not have."""


class EnvironmentCalls:
    """Calls of the environments of one gateway by its sessions' agents."""

    def __init__(self, states: EpisodeStates, journal: Journal, metrics: GatewayMetrics) -> None:
        self._states = states
        self._journal = journal
        self._metrics = metrics

    def tools(self, session: GatewaySession) -> Sequence[Mapping[str, Any]]:
        """Returns the tools of a session's environment in OpenAI's format."""
        info = self._states.info(session)
        return () if info is None else info.tools

    async def call_tool(
        self, session: GatewaySession, name: str, arguments: Mapping[str, Any], key: str | None
    ) -> ToolResult:
        """Calls a tool; the call is recorded when this returns.

        Args:
            session: The session.
            name: Name of the tool; an unknown one is an error that the agent can read.
            arguments: Its arguments.
            key: A repeated call with the same key returns the first one's result.

        Raises:
            ApiError: The environment's state is lost, or a budget of the session is exhausted.
            GatewayError: The session is over (410), the call cannot be recorded (503), or it is too large.
        """
        _check_size(f"the arguments of {_shown(name)}", {name: arguments})
        await self._prepare(session)
        earlier = session.tool_calls.find(key, name, arguments)
        if isinstance(earlier, ToolCall):
            return ToolResult(earlier.result, earlier.error)
        if earlier is None:
            check_tool_calls(session)
            earlier = asyncio.create_task(self._record(session, name, arguments, key), name=f"tool {name}")
            session.tool_calls.start_call(earlier, key, name, arguments)
        call = await self._result(session, earlier)
        return ToolResult(call.result, call.error)

    async def respond(self, session: GatewaySession, reply: Message, key: str | None) -> Response:
        """Passes the agent's reply to the counterpart; the conversation is over if there is none.

        Raises as `call_tool` does.
        """
        _check_size("the message", reply)
        await self._prepare(session)
        service, info = self._states.service, self._states.info(session)
        if service is None or info is None or not info.stateful:
            return Response(None, True)
        responding = asyncio.create_task(self._ask(session, service.respond(session.id, reply, key)))
        session.tool_calls.start(responding)
        return await self._result(session, responding)

    async def _prepare(self, session: GatewaySession) -> None:
        _check_open(session)
        await self._states.ready(session)
        # The session may have ended while its state was made.
        _check_open(session)

    async def _result(self, session: GatewaySession, task: asyncio.Task[T]) -> T:
        """Waits for a call, which continues if its client disconnects and ends with the session."""
        try:
            async with asyncio.timeout_at(session.deadline):
                await asyncio.wait((task,))
        except TimeoutError:
            raise _over("its deadline passed") from None
        if task.cancelled():
            raise _over(session.closed or "it was closed")
        return task.result()

    async def _record(
        self, session: GatewaySession, name: str, arguments: Mapping[str, Any], key: str | None
    ) -> ToolCall:
        newest = session.tree.newest()
        turn = None if newest is None else newest.turn.index
        started, clock = time.time(), time.perf_counter()
        names = [tool["function"]["name"] for tool in self.tools(session)]
        result = await self._call(session, name, arguments, key, names)
        call = ToolCall(
            name, dict(arguments), bounded(result.content), result.error, turn, started,
            time.perf_counter() - clock, name in names,
        )  # fmt: skip
        number = session.tool_calls.numbers
        # Before the write, during which other calls may end: each needs its own number.
        session.tool_calls.numbers += 1
        await self._journal.tool_called(session, number, call, key)
        session.tool_calls.add(call)
        # A model can make up any number of names.
        label = name if call.known else UNKNOWN
        self._metrics.tool_calls[label] += 1
        self._metrics.tool_errors[label] += call.error
        self._metrics.tool_seconds.observe(call.seconds)
        return call

    async def _call(
        self,
        session: GatewaySession,
        name: str,
        arguments: Mapping[str, Any],
        key: str | None,
        names: Sequence[str],
    ) -> ToolResult:
        service = self._states.service
        if service is None or name not in names:
            known = f"the tools are {', '.join(names)}" if names else "this episode has no tools"
            return ToolResult(f"there is no tool {_shown(name)}; {known}", error=True)
        return await self._ask(session, service.call_tool(session.id, name, arguments, key))

    async def _ask(self, session: GatewaySession, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        except EpisodeLostError as error:
            self._states.lose(session, str(error))
            raise environment_failure(str(session.state_lost)) from error


def bounded(text: str) -> str:
    """Returns a tool's result, cut to MAX_RESULT bytes with a note if it is longer."""
    # A lone surrogate can be neither sent nor stored.
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_RESULT:
        return data.decode()
    shown = data[:MAX_RESULT].decode("utf-8", "ignore")
    return f"{shown}\n[the result has {len(data)} bytes; it was cut after {MAX_RESULT}]"


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…")


def _check_size(what: str, value: Mapping[str, Any]) -> None:
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"{what} cannot be recorded: {error}", status=400) from None
    if size > MAX_ARGUMENTS:
        raise GatewayError(f"{what}: {size} bytes, more than the limit of {MAX_ARGUMENTS}", status=413)


def _check_open(session: GatewaySession) -> None:
    if session.closed is not None:
        raise _over(session.closed)
    if asyncio.get_running_loop().time() >= session.deadline:
        raise _over("its deadline passed")


def _over(why: str) -> GatewayError:
    return GatewayError(f"this session is over ({why}); it accepts no more calls", status=410)
