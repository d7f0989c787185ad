"""Agents: loading, functions as agents, and the attributes of a session."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from tidegate.agents.base import Agent, FunctionAgent, Result, Session, agent, load_agent
from tidegate.agents.command import CommandAgent
from tidegate.agents.solver import Solver
from tidegate.errors import ConfigError
from tidegate.types import TaskView

TASK = TaskView("t", [{"role": "user", "content": "?"}])


def session(seconds: float = 60.0, base_url: str = "http://gate/s/1/v1", key: str = "key-1") -> Session:
    return Session(base_url, key, "policy", 7, time.monotonic() + seconds)


OWN = """
from tidegate.agents.base import Agent, agent

class Own(Agent):
    def __init__(self, style="short"): self.style = style
    async def run(self, task, session): return self.style

@agent
async def told(task, session, loud=False): return "HEY" if loud else "hey"

def plain(task, session): return "plain"

class Half(Agent):
    pass

class Broken(Agent):
    def __init__(self): {}["style"]
    async def run(self, task, session): return ""

def needs(task, session, style): return style
def any_style(task, session, **styles): return styles["style"]
def lonely(task): return task

ready = Own("ready")
number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_agents.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize(
    ("name", "options", "output"),
    [
        ("Own", {}, "short"),
        ("Own", {"style": "long"}, "long"),
        ("ready", {}, "ready"),
        ("told", {}, "hey"),
        ("told", {"loud": True}, "HEY"),
        ("plain", {}, "plain"),
        ("needs", {"style": "fine"}, "fine"),
        ("any_style", {"style": "rare"}, "rare"),
    ],
)
async def test_an_own_agent_is_found_in_a_file(own: Path, name: str, options: dict, output: str) -> None:
    assert await load_agent(f"{own}:{name}", options).run(TASK, session()) == output


async def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_agent.py").write_text("WORD = 'hello'")
    file = tmp_path / "with_neighbour.py"
    file.write_text("from neighbour_of_agent import WORD\ndef greet(task, session): return WORD")
    assert await load_agent(f"{file}:greet", {}).run(TASK, session()) == "hello"


def test_built_in_agents() -> None:
    assert isinstance(load_agent("solver", {"max_turns": 2}), Solver)
    assert isinstance(load_agent("command", {"command": ["true"]}), CommandAgent)
    assert isinstance(load_agent("tidegate.agents.solver:Solver", {}), Solver)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("slover", {}, "no agent 'slover'; did you mean 'solver'"),
        ("solver", {"max_turn": 2}, "no option 'max_turn'; did you mean 'max_turns'"),
        ("command", {}, "needs the option 'command'"),
        ("command", {"command": "node agent.js"}, "must be a list of words"),
        ("FILE:Onw", {}, "has no agent 'Onw'; did you mean 'Own'"),
        ("FILE:told", {"lout": True}, "no option 'lout'; did you mean 'loud'"),
        ("FILE:ready", {"style": "x"}, "neither a class nor a function"),
        ("FILE:number", {}, "is not an agent"),
        ("FILE:needs", {}, r"needs\(task, session, style\) cannot be called .*: missing a .*: 'style'"),
        (
            "FILE:lonely",
            {},
            r"lonely\(task\) cannot be called with task, session and agent.options: too many",
        ),
        ("FILE:Half", {}, "Half' lacks the method run, which its base class needs"),
        ("FILE:Broken", {}, r"cannot be constructed: KeyError: 'style' \(.*own_agents.py:17, in __init__\)"),
        ("elsewhere.py:Own", {}, "elsewhere.py: there is no such file"),
        ("no_such_module:Own", {}, "'no_such_module' cannot be imported"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_words(own: Path, use: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_agent(use.replace("FILE", str(own)), options)


async def test_a_function_that_is_not_async_runs_in_a_thread() -> None:
    together = threading.Barrier(20, timeout=10)

    @agent
    def meet(task: TaskView, session: Session) -> str:
        together.wait()  # passes only where twenty run at once
        return threading.current_thread().name

    assert isinstance(meet, FunctionAgent)
    names = await asyncio.gather(*(meet.run(TASK, session()) for _ in range(20)))
    assert set(names) == {"agent"}


async def test_what_a_function_raises_is_raised() -> None:
    @agent
    def broken(task: TaskView, session: Session) -> str:
        raise KeyError("lost")

    @agent
    def ends(task: TaskView, session: Session) -> str:
        return next(iter(()))

    with pytest.raises(KeyError, match="lost"):
        await broken.run(TASK, session())
    with pytest.raises(RuntimeError, match="StopIteration"):
        await ends.run(TASK, session())


async def test_a_function_that_hangs_can_be_left() -> None:
    release = threading.Event()

    @agent
    def hang(task: TaskView, session: Session) -> None:
        release.wait(30)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await hang.run(TASK, session())
    release.set()


def test_a_subclass_must_say_how_it_runs() -> None:
    class Idle(Agent):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Idle()


async def test_clients_of_sessions_share_connections_and_nothing_else() -> None:
    one = session(base_url="http://gate/s/1/v1", key="key-1").openai()
    two = session(base_url="http://gate/s/2/v1", key="key-2").openai()
    assert str(one.base_url) == "http://gate/s/1/v1/"
    assert str(two.base_url) == "http://gate/s/2/v1/"
    assert (one.api_key, two.api_key) == ("key-1", "key-2")
    assert one._client is two._client
    sync = session(base_url="http://gate/s/2/v1", key="key-2").sync_openai()
    assert (str(sync.base_url), sync.api_key) == ("http://gate/s/2/v1/", "key-2")


async def test_a_client_waits_no_longer_than_the_run_may_last() -> None:
    assert session(5.0).openai().timeout == pytest.approx(5.0, abs=0.5)
    assert session(-1.0).remaining() == 0.0
    assert session(-1.0).openai().timeout == 0.001, "aiohttp waits for ever with 0"


def test_every_event_loop_has_connections_of_its_own() -> None:
    async def client() -> object:
        return session().openai()._client

    assert asyncio.run(client()) is not asyncio.run(client())


def test_a_result_needs_only_its_output() -> None:
    assert Result("x") == Result("x", None, {})
