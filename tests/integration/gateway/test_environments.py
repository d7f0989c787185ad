"""Episodes with state and tools: their setup, calls, record and end, by the routes that an agent uses."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import REPO
from tests.environments import TASK, LocalEnvironments, Safe
from tests.fakes import Stage, eventually, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session
from tidegate.agents.chat import ChatAgent
from tidegate.envs.base import Environment
from tidegate.gateway.client import SessionAccess
from tidegate.types import Outcome, Task, Trajectory

STATELESS = Task("sum", "sums", [{"role": "user", "content": "1+2?"}])


@pytest.fixture
def service() -> LocalEnvironments:
    return LocalEnvironments(Safe())


@pytest.fixture
async def stage(tmp_path: Path, service: LocalEnvironments) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=service) as made:
        yield made


async def opened(stage: Stage, **options: Any) -> Session:
    return session_of(await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options}))


def session_of(access: SessionAccess) -> Session:
    return Session(access.base_url, access.api_key, "policy", 0, time.monotonic() + 20)


def id_of(session: Session) -> str:
    return session.url.rpartition("/")[2]


async def finished(stage: Stage, session: Session, **report: Any) -> Trajectory:
    await stage.client.finish(id_of(session), **{"reward": 1, **report})
    return await stage.client.trajectory(id_of(session))


def call(name: str, id: str = "call_1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def tool_call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_the_chat_agent_uses_tools_and_answers_the_other_side(
    stage: Stage, service: LocalEnvironments
) -> None:
    for text in (
        tool_call_text("enter", digit=4), "It is open.", tool_call_text("enter", digit=7), "Now it is open."
    ):  # fmt: skip
        stage.say(text)
    session = await opened(stage)
    output = await ChatAgent().run(TASK.view(), session)
    assert output == "Now it is open."
    trajectory = await finished(stage, session, output=output)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    calls = [(one.name, one.arguments, one.result, one.error, one.turn) for one in trajectory.tool_calls]
    assert calls == [("enter", {"digit": 4}, "closed", False, 0), ("enter", {"digit": 7}, "open", False, 2)]
    assert all(0 < one.seconds < 5 and abs(one.started - time.time()) < 20 for one in trajectory.tool_calls)
    roles = [(message["role"], message["content"]) for message in trajectory.messages]
    assert roles[2:5] == [("tool", "closed"), ("assistant", "It is open."), ("user", "It is closed (1).")]
    assert trajectory.metrics["tool_calls"] == 2
    assert trajectory.metrics["tool_errors"] == 0
    assert trajectory.metrics["tool_seconds"] > 0
    await eventually(lambda: service.events == [("setup", id_of(session)), ("teardown", id_of(session))])
    assert not service.states


async def test_the_chat_agent_ends_after_the_first_reply_of_a_stateless_task(
    stage: Stage, service: LocalEnvironments
) -> None:
    stage.say("3")
    session = await opened(stage, task=STATELESS)
    assert await ChatAgent().run(STATELESS.view(), session) == "3"
    assert await session.tools() == []
    assert (await finished(stage, session)).metrics == {}
    assert service.events == []


async def test_errors_of_tools_are_results_that_the_agent_reads(stage: Stage) -> None:
    session = await opened(stage)
    refused = await session.call(call("enter", digit=11))
    assert refused == {"role": "tool", "tool_call_id": "call_1", "content": "11 is not a digit"}
    assert "digit" in (await session.call(call("enter", "2", figure=1)))["content"]
    unknown = await session.call(call("leave", "3"))
    assert unknown["content"] == "there is no tool 'leave'; the tools are enter, read"
    bad = {"id": "4", "function": {"name": "enter", "arguments": "{digit"}}
    assert "not JSON" in (await session.call(bad))["content"]
    stage.say("done")
    await session.respond({"role": "assistant", "content": "done"})
    trajectory = await finished(stage, session)
    assert [one.error for one in trajectory.tool_calls] == [True, True, True]
    metrics = await stage.client.metrics()
    assert 'tidegate_gateway_tool_errors_total{tool="enter"} 2.0' in metrics
    assert 'tidegate_gateway_tool_calls_total{tool="unknown"} 1.0' in metrics


async def test_a_repeated_request_gets_the_first_result(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    llm = session.openai()

    async def post(digit: int, key: str) -> Any:
        headers = {"idempotency-key": key}
        path, body = f"{session.url}/tools/enter", {"digit": digit}
        answer: Any = await llm.post(path, cast_to=object, body=body, options={"headers": headers})
        return answer["content"]

    for _ in range(3):
        assert await post(4, "a") == "closed"
    assert service.calls == 1
    with pytest.raises(openai.BadRequestError, match="another call was sent with it"):
        await post(7, "a")
    assert await post(7, "b") == "open"
    assert len((await finished(stage, session)).tool_calls) == 2


async def test_the_first_calls_wait_for_the_setup(stage: Stage, service: LocalEnvironments) -> None:
    service.hold = asyncio.Event()
    session = await opened(stage)
    stage.say("hello")
    calls = [
        asyncio.create_task(ChatAgent(1).run(TASK.view(), session)),
        asyncio.create_task(session.call(call("enter", digit=4))),
    ]
    await eventually(lambda: service.events)
    done, _ = await asyncio.wait(calls, timeout=0.2)
    assert not done
    assert not stage.engine.requests
    service.hold.set()
    assert await calls[0] == "hello"
    assert (await calls[1])["content"] == "closed"


def documented() -> Environment:
    """The example of docs/environments.md."""
    text = (REPO / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Safe" in one]
    names: dict[str, Any] = {"__name__": "safe"}
    exec(compile(code, "safe.py", "exec"), names)
    made: Environment = names["Safe"]()
    return made


async def test_the_documented_example_runs(tmp_path: Path) -> None:
    environment = documented()
    assert not {environment.train_task(n).id for n in range(90)} & {
        one.id for one in environment.eval_sets()[""]
    }
    task, service = environment.train_task(47), LocalEnvironments(environment)
    async with staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=service) as stage:
        for text in (
            tool_call_text("enter", digit=7), "So?", tool_call_text("enter", digit=11),
            tool_call_text("enter", digit=4), "It is open.",
        ):  # fmt: skip
            stage.say(text)
        session = await opened(stage, task=task)
        output = await ChatAgent().run(task.view(), session)
        assert output == "It is open."
        results = [one.result for one in stage.gateway.session(id_of(session)).tool_calls.recorded]
        assert results == ["closed", "11 is not a digit", "open"]
        state = service.states[id_of(session)]
        assert environment.score(task, None, output, [], state).reward == 1.0
