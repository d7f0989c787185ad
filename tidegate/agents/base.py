"""Agents: code that receives a task and an OpenAI-compatible endpoint, and returns an output.

    class Solver(Agent):
        async def run(self, task, session):
            llm = session.openai()
            reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
            return reply.choices[0].message.content

Agents run in separate processes, many episodes per process at the same time. They are trusted code: they can
read every file that their user can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tidegate.errors import ConfigError
from tidegate.loading import construct, did_you_mean, load_object
from tidegate.service.threads import in_thread
from tidegate.types import Message, TaskView

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

RETRIES = 6
"""Retries of one call; with the SDK's backoff about 20 s in total, longer than a gateway takes to restart."""
UNTRAINED = {"x-tidegate-train": "no"}
"""Header of calls that are recorded but not trained on."""
_MAX_TOOL_NAME = 256
"""Characters of a sampled tool name that are sent; names of tools have at most 64."""
BUILT_IN = {
    "chat": "tidegate.agents.chat:ChatAgent",
    "search": "tidegate.agents.search:SearchAgent",
    "shell": "tidegate.agents.chat:ShellAgent",
    "solver": "tidegate.agents.solver:Solver",
    "command": "tidegate.agents.command:CommandAgent",
    "verifiers": "tidegate.agents.verifiers:VerifiersAgent",
}


@dataclass(frozen=True, slots=True)
class Session:
    """An episode's access to the model, for any client that can set a base URL and an API key."""

    base_url: str
    """The session's OpenAI-compatible endpoint, ending in `/v1`."""
    api_key: str
    """Secret key of the session."""
    model: str
    """Model name to put into requests."""
    seed: int | None
    """Seed for the agent's own random choices; sampling has a separate one."""
    deadline: float
    """Time at which the episode is stopped, on the clock of `time.monotonic()`."""
    _tools: list[list[dict[str, Any]]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The environment's tools, once they were read."""

    @property
    def url(self) -> str:
        """The session's address, below which its routes are."""
        return self.base_url.removesuffix("/v1")

    @property
    def mcp_url(self) -> str:
        """The session's MCP server (streamable HTTP), which serves the environment's tools to its key."""
        return f"{self.url}/mcp"

    async def tools(self) -> Sequence[dict[str, Any]]:
        """Returns the tools of the task's environment in OpenAI's format; empty if it has none."""
        if not self._tools:
            answer: Any = await self.openai().get(f"{self.url}/tools", cast_to=object)
            self._tools.append(answer["tools"])
        return self._tools[0]

    async def call(self, tool_call: Any) -> Message:
        """Calls a tool of the environment.

        Args:
            tool_call: A tool call of the model's reply: the SDK's object, or a dict.

        Returns:
            The message `{"role": "tool", …}` with the result, or with the error that the model should read.

        Raises:
            openai.APIError: The episode is over or its state is lost, or the gateway did not respond.
        """
        data = tool_call if isinstance(tool_call, Mapping) else tool_call.model_dump()
        function, call_id = data["function"], data["id"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return _tool_message(call_id, f"the arguments of {function['name']!r} are not JSON: {error}")
        if not isinstance(arguments, dict):
            return _tool_message(call_id, f"the arguments of {function['name']!r} are not a JSON object")
        # Models make names up: dots would be removed from the path, and a URL has a maximum length.
        name = quote(function["name"][:_MAX_TOOL_NAME], safe="", errors="replace").replace(".", "%2E")
        answer = await self._post(f"tools/{name}", arguments)
        return _tool_message(call_id, answer["content"])

    async def respond(self, message: Message) -> Message | None:
        """Passes the agent's reply to the environment's counterpart.

        Args:
            message: The reply as a chat message.

        Returns:
            The next message to the agent; None if the conversation is over.

        Raises:
            openai.APIError: As for `call`.
        """
        answer = await self._post("respond", {"message": message})
        following: Message | None = None if answer["done"] else answer["message"]
        return following

    async def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        """Sends a request with the SDK's client, which repeats it as it repeats model calls."""
        # Not a tool call's id: some clients give several calls the same one.
        headers = {"idempotency-key": uuid.uuid4().hex}
        url = f"{self.url}/{route}"
        return await self.openai().post(url, cast_to=object, body=body, options={"headers": headers})

    def remaining(self) -> float:
        """Returns the seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def openai(self, *, train: bool = True) -> AsyncOpenAI:
        """Returns an `AsyncOpenAI` client of this session. All clients share one connection pool.

        Requests, replies, retries and errors are those of the SDK; its HTTP client is one that needs less CPU
        time (docs/clients.md).

        Args:
            train: False for auxiliary calls: they are recorded but never trained on.
        """
        remaining = self.remaining()
        return _shared_async(asyncio.get_running_loop()).with_options(
            base_url=self.base_url,
            api_key=self.api_key,
            # aiohttp takes no infinite one, and reads 0 as none.
            timeout=max(remaining, 0.001) if remaining < math.inf else None,
            default_headers={} if train else UNTRAINED,
        )

    def sync_openai(self, *, train: bool = True) -> OpenAI:
        """Returns a synchronous client of this session, for agents that are plain functions.

        Args:
            train: as for `openai`.
        """
        return _shared_sync().with_options(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout=self.remaining(),
            default_headers={} if train else UNTRAINED,
        )


def _tool_message(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an episode, for agents that return more than their output."""

    output: str | None
    """The output that the rewards score."""
    reward: float | Mapping[str, float] | None = None
    """Used only if the environment has no reward functions. In a run with several policies it may be a reward
    for each, by name: the episode's is then their mean."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Recorded with the episode as `episode/<name>`."""


class Agent(ABC):
    """Base class of agents.

    One object runs all episodes of its process, many at the same time, so it must not keep the state of an
    episode in its attributes.
    """

    @abstractmethod
    async def run(self, task: TaskView, session: Session) -> str | Result | None:
        """Works on a task.

        Args:
            task: The task's id and prompt.
            session: Access to the model; its deadline ends the episode as `timeout`.

        Returns:
            The output, alone or in a `Result`; None if there is no output.

        Raises:
            InfrastructureError: A service that the agent needs failed; the episode ends as `infra_error`.
            Exception: Any other exception ends the episode as `agent_error`.
        """


AgentFunction = Callable[..., "Awaitable[str | Result | None] | str | Result | None"]


class FunctionAgent(Agent):
    """Makes an agent of a function `(task, session, **options)`; synchronous functions run in a thread."""

    def __init__(self, function: AgentFunction, options: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.options = dict(options or {})

    async def run(self, task: TaskView, session: Session) -> str | Result | None:
        call = functools.partial(self.function, task, session, **self.options)
        result = call() if inspect.iscoroutinefunction(self.function) else await in_thread(call, "agent")
        return await result if inspect.isawaitable(result) else result

    def with_options(self, options: Mapping[str, Any]) -> FunctionAgent:
        """Returns an agent that calls the function with these options.

        Raises:
            ConfigError: The function takes no task and session, does not take an option, or needs another.
        """
        signature, name = inspect.signature(self.function), self.function.__name__
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        names = list(signature.parameters)[2:]
        for option in options if inspect.Parameter.VAR_KEYWORD not in kinds else ():
            if option not in names:
                hint = did_you_mean(option, names)
                raise ConfigError(f"the agent {name!r} has no option {option!r}{hint}")
        try:
            signature.bind(None, None, **options)
        except TypeError as error:
            raise ConfigError(
                f"the agent {name}{signature} cannot be called with task, session and agent.options: {error}"
            ) from None
        return FunctionAgent(self.function, options)


def agent(function: AgentFunction) -> FunctionAgent:
    """Decorator that turns a function `(task, session, **options)` into an agent."""
    return FunctionAgent(function)


def load_agent(use: str, options: Mapping[str, Any]) -> Agent:
    """Loads the agent that the settings name.

    Args:
        use: A built-in name, `file.py:Name`, or `module:Name` of a class, a function or an instance.
        options: Arguments of the class's constructor, or keyword arguments of the function.

    Raises:
        ConfigError: The agent cannot be loaded, is not an agent, or does not take an option.
    """
    loaded = load_object(use, BUILT_IN, "agent")
    if isinstance(loaded, type) and issubclass(loaded, Agent):
        loaded = construct(loaded, options, f"agent {use!r}")
    elif inspect.isfunction(loaded) or isinstance(loaded, FunctionAgent):
        loaded = (loaded if isinstance(loaded, FunctionAgent) else FunctionAgent(loaded)).with_options(
            options
        )
    elif options:
        raise ConfigError(f"{use} is neither a class nor a function, so agent.options cannot be passed to it")
    if not isinstance(loaded, Agent):
        raise ConfigError(f"{use} is not an agent: it is neither an Agent nor a function of (task, session)")
    return loaded


# Constructing an AsyncOpenAI takes about 20 ms of CPU, deriving one from another 0.05 ms. Connections
# belong to an event loop, so there is one client per loop.
_clients: dict[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, AsyncGenerator[None, None]]] = {}


def _shared_async(loop: asyncio.AbstractEventLoop) -> AsyncOpenAI:
    if loop not in _clients:
        from tidegate.agents.sdk.client import new_openai

        client = new_openai(base_url="http://unset.invalid", api_key="unset", max_retries=RETRIES)
        closing = _close_with_loop(loop)
        with contextlib.suppress(StopIteration):
            closing.__anext__().send(None)  # runs it up to its yield, by which the loop knows it
        _clients[loop] = client, closing
    return _clients[loop][0]


async def _close_with_loop(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
    """Closes a loop's client when the loop ends, as `asyncio.run` then closes its generators. aiohttp reports
    a session that is not closed as an error."""
    try:
        yield
    finally:
        await _clients.pop(loop)[0].close()


@functools.cache
def _shared_sync() -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url="http://unset.invalid", api_key="unset", max_retries=RETRIES)
