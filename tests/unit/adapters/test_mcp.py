"""Tools of an MCP server, as a process and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.adapters.scored import PEERS
from tidegate.envs.base import load_environment
from tidegate.envs.tools import ToolError
from tidegate.errors import ConfigError

SERVER = f"mcp:{sys.executable} {PEERS / 'mcp_server.py'}"


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": f"w{n}", "answer": f"{n}w"} for n in range(20)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"use": "dataset", "options": {"path": str(tmp_path / "words.jsonl")}}


async def test_each_episode_has_a_connection_and_the_tasks_rewards(tasks: dict[str, Any]) -> None:
    environment = load_environment(SERVER, {"tasks": tasks})
    assert [tool.name for tool in environment.tools()] == ["reverse", "fail"]
    assert environment.tools()[0].schema()["function"]["parameters"]["required"] == ["text"]
    task = environment.train_task(0)
    assert task.env == "mcp"
    states = await asyncio.gather(*(environment.setup(task) for _ in range(3)))
    reverse, fail = environment.tools()
    results = await asyncio.gather(*(reverse.fn(state, {"text": f"ab{n}"}) for n, state in enumerate(states)))
    assert results == ["0ba", "1ba", "2ba"]
    with pytest.raises(ToolError, match=r"^cannot do this$"):
        await fail.fn(states[0], {"text": "this"})
    assert environment.score(task, None, task.answer, [], states[0]).reward == 1.0
    assert environment.gold_output(task) == task.answer
    for state in states:
        await asyncio.create_task(environment.teardown(state))  # another task than that of setup()
        assert state.task.done()


async def test_a_call_has_a_deadline(tasks: dict[str, Any]) -> None:
    environment = load_environment(SERVER, {"tasks": tasks, "timeout_s": 0.2})
    state = await environment.setup(environment.train_task(0))
    with pytest.raises(ToolError, match=r"'reverse' did not answer within 0.2 s"):
        await environment.tools()[0].fn(state, {"text": "stall"})
    await environment.teardown(state)


async def test_a_server_that_exits_fails_its_calls_and_ends_in_teardown(tasks: dict[str, Any]) -> None:
    environment = load_environment(SERVER, {"tasks": tasks})
    state = await environment.setup(environment.train_task(0))
    with pytest.raises(ToolError, match="'reverse' failed"):
        await environment.tools()[0].fn(state, {"text": "exit"})
    await environment.teardown(state)
    assert state.task.done()


def test_tools_are_chosen_by_name(tasks: dict[str, Any]) -> None:
    environment = load_environment(SERVER, {"tasks": tasks, "tools": ["fail"]})
    assert [tool.name for tool in environment.tools()] == ["fail"]
    with pytest.raises(ConfigError, match="has no tool 'revers'; did you mean 'reverse'"):
        load_environment(SERVER, {"tasks": tasks, "tools": ["revers"]})


def test_servers_and_tasks_are_checked(tasks: dict[str, Any]) -> None:
    for server in ("no_such_command", "http://127.0.0.1:9/mcp", f"{sys.executable} -c pass"):
        with pytest.raises(ConfigError, match=r"the MCP server '.*' cannot be used"):
            load_environment(f"mcp:{server}", {"tasks": tasks})
    with pytest.raises(ConfigError, match="needs the option 'tasks'"):
        load_environment(SERVER, {})
    with pytest.raises(ConfigError, match="'tasks' must be a table"):
        load_environment(SERVER, {"tasks": "arithmetic"})
