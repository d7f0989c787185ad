"""The episodes of one worker process: their states, tools and counterparts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tidegate.envs.base import Done, Environment
from tidegate.envs.tools import ToolError, text_of
from tidegate.errors import InfrastructureError, TidegateError
from tidegate.loading import did_you_mean
from tidegate.service.threads import in_thread
from tidegate.tracebacks import where
from tidegate.types import Task

MAX_RESULT = 65_536
"""Characters of a tool's result; a longer one is cut."""
MAX_REPEATED = 1024
"""Results that an episode keeps for repeated calls."""


class EpisodeError(TidegateError):
    """An episode's set-up or its counterpart failed."""


class Episode:
    """One episode of a stateful environment. Its tools run one at a time, in the order of their calls."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self.environment = environment
        self.task = task
        self.state: Any = None
        self.over = False
        """Whether it is being torn down: calls that have not begun are dropped."""
        self._tools = {tool.name: tool for tool in environment.tools()}
        self._lock = asyncio.Lock()
        self._results: dict[str, Any] = {}
        """By key: results of earlier calls."""

    async def setup(self) -> None:
        """Raises EpisodeError."""
        try:
            self.state = await self.environment.setup(self.task)
        except Exception as error:
            raise EpisodeError(f"setup {_raised(error)}") from error

    async def once(self, key: str | None, call: Callable[[], Any], started: Callable[[], None]) -> Any:
        """Awaits a call, or returns the result of the earlier call with the same key.

        `started` is called when the call begins, which is after the episode's earlier calls. Raises
        EpisodeError if the episode ended meanwhile.
        """
        async with self._lock:
            if self.over:
                raise EpisodeError("the episode has ended")
            if key is not None and key in self._results:
                return self._results[key]
            started()
            result = await call()
            if key is not None:
                self._results[key] = result
                if len(self._results) > MAX_REPEATED:
                    del self._results[next(iter(self._results))]
            return result

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tool's result as `content` and whether it is an `error`. No exception is raised."""
        tool = self._tools.get(name)
        try:
            if tool is None:
                known = f"{did_you_mean(name, self._tools)}; there are {', '.join(self._tools) or 'none'}"
                raise ToolError(f"there is no tool {name!r}{known}")
            if inspect.iscoroutinefunction(tool.fn):
                result = await tool.fn(self.state, arguments)
            else:
                result = await in_thread(partial(tool.fn, self.state, arguments), "tool")
                result = await result if inspect.isawaitable(result) else result
            return {"content": cut(text_of(result)), "error": False}
        except InfrastructureError as error:
            raise EpisodeError(f"the tool {name}: {error}") from error
        except ToolError as error:
            return {"content": cut(str(error)), "error": True}
        except Exception as error:  # noqa: BLE001 - the agent reads it
            return {"content": cut(f"{name} failed: {type(error).__name__}: {error}"), "error": True}

    async def respond(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Returns the counterpart's `message`, or None, and whether the conversation is `done`.

        Raises:
            EpisodeError: The environment raised.
        """
        try:
            answer = await self.environment.respond(self.state, reply)
        except Exception as error:
            raise EpisodeError(f"respond {_raised(error)}") from error
        done = isinstance(answer, Done)
        content = answer.content if isinstance(answer, Done) else answer
        message = {"role": "user", "content": content} if isinstance(content, str) else content
        if not (isinstance(message, dict) or (done and message is None)):
            raise EpisodeError(f"respond returned {type(answer).__name__}, not a message, a text or Done")
        return {"message": message, "done": done}

    async def teardown(self, started: Callable[[], None] = lambda: None) -> None:
        """Releases the state, after the call that uses it. Raises EpisodeError.

        `started` is called when the environment's code begins to run.
        """
        self.over = True
        async with self._lock:
            started()
            try:
                await self.environment.teardown(self.state)
            except Exception as error:
                raise EpisodeError(f"teardown {_raised(error)}") from error


def cut(text: str) -> str:
    """Returns a text of at most MAX_RESULT characters, with a note if it was cut."""
    if len(text) <= MAX_RESULT:
        return text
    return f"{text[:MAX_RESULT]}\n[the result has {len(text)} characters; the rest is left out]"


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}{where(error)}"
