"""What an agent is: code that is given a task and an OpenAI-compatible endpoint, and returns an output.

    class Solver(Agent):
        async def run(self, task, session):
            llm = session.openai()
            reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
            return reply.choices[0].message.content

An agent runs in a process of its own, many runs at once. It is trusted code: nothing keeps it from
reading files that its user can read.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.loading import construct, did_you_mean, load_object
from tidegate.types import TaskView

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

RETRIES = 6
"""Of one call, with the SDK's back-off some 20 s in all: longer than a gateway's restart takes."""
UNTRAINED = {"x-tidegate-train": "no"}
"""The header of calls that are recorded and not trained on."""
BUILT_IN = {
    "search": "tidegate.agents.search:SearchAgent",
    "solver": "tidegate.agents.solver:Solver",
    "command": "tidegate.agents.command:CommandAgent",
}


@dataclass(frozen=True, slots=True)
class Session:
    """One run's access to the model. Any client that can set a base URL and a key may use it."""

    base_url: str
    api_key: str
    model: str
    seed: int | None
    """For the agent's own dice; sampling has its own."""
    deadline: float
    """On `time.monotonic()`'s clock; then the run is ended."""

    def remaining(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def openai(self, *, train: bool = True) -> AsyncOpenAI:
        """An `AsyncOpenAI` bound to this session; all of them share one pool of connections.

        With `train` False its calls are auxiliary ones: recorded, never trained on.
        """
        return _shared_async(asyncio.get_running_loop()).with_options(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout=self.remaining(),
            default_headers={} if train else UNTRAINED,
        )

    def sync_openai(self, *, train: bool = True) -> OpenAI:
        """The same for agents that are plain functions."""
        return _shared_sync().with_options(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout=self.remaining(),
            default_headers={} if train else UNTRAINED,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. `reward` counts only where the environment has none of its own."""

    output: str | None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Agent(ABC):
    """One object serves every run of its process, many at once: it keeps nothing of a run in itself."""

    @abstractmethod
    async def run(self, task: TaskView, session: Session) -> str | Result | None:
        """Work on the task until there is an output. What it raises ends the run as `agent_error`,
        an InfrastructureError as `infra_error`."""


AgentFunction = Callable[..., "Awaitable[str | Result | None] | str | Result | None"]


class FunctionAgent(Agent):
    """A function `(task, session, **options)` as an agent; one that is not async runs in a thread."""

    def __init__(self, function: AgentFunction, options: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.options = dict(options or {})

    async def run(self, task: TaskView, session: Session) -> str | Result | None:
        call = functools.partial(self.function, task, session, **self.options)
        result = call() if inspect.iscoroutinefunction(self.function) else await _in_thread(call)
        return await result if inspect.isawaitable(result) else result

    def with_options(self, options: Mapping[str, Any]) -> FunctionAgent:
        """The same function, called with these options; raises ConfigError on one that it doesn't take."""
        names = list(inspect.signature(self.function).parameters)
        for option in options:
            if option not in names[2:]:
                known = did_you_mean(option, names[2:])
                raise ConfigError(f"the agent {self.function.__name__!r} has no option {option!r}{known}")
        return FunctionAgent(self.function, options)


def agent(function: AgentFunction) -> FunctionAgent:
    """Decorator: a function of (task, session) becomes an agent."""
    return FunctionAgent(function)


def load_agent(use: str, options: Mapping[str, Any]) -> Agent:
    """The agent that the settings name: a built-in name, `file.py:Name`, or `module:Name`.

    A class is constructed with `options`, a function is called with them, an instance is used as it is.
    Raises ConfigError.
    """
    found = load_object(use, BUILT_IN, "agent")
    if isinstance(found, type) and issubclass(found, Agent):
        found = construct(found, options, f"agent {use!r}")
    elif inspect.isfunction(found) or isinstance(found, FunctionAgent):
        found = (found if isinstance(found, FunctionAgent) else FunctionAgent(found)).with_options(options)
    elif options:
        raise ConfigError(f"{use} is neither a class nor a function, so agent.options cannot be passed to it")
    if not isinstance(found, Agent):
        raise ConfigError(f"{use} is no agent: it is neither an Agent nor a function of (task, session)")
    return found


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own.

    Not in a pool: functions that hang would fill it, and would be waited for when the process ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def end(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except StopIteration as error:  # no future can hold one
            failure = RuntimeError(f"the agent raised StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - handed to the waiting run
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(end, result, failure)

    threading.Thread(target=work, daemon=True, name="agent").start()
    return await future


# A fresh AsyncOpenAI costs some 20 ms of CPU, one derived from another 0.05 ms. Connections belong to an
# event loop, so there is one client per loop.
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = weakref.WeakKeyDictionary()


def _shared_async(loop: asyncio.AbstractEventLoop) -> AsyncOpenAI:
    client = _clients.get(loop)
    if client is None:
        from openai import AsyncOpenAI

        client = _clients[loop] = AsyncOpenAI(
            base_url="http://unset.invalid", api_key="unset", max_retries=RETRIES
        )
    return client


@functools.cache
def _shared_sync() -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url="http://unset.invalid", api_key="unset", max_retries=RETRIES)
