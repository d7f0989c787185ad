"""A gateway with environments in real processes: a whole episode, and the loss of a state."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.fakes import Stage, eventually, staged
from tests.integration.envs.test_service import service
from tests.integration.gateway.test_environments import call, finished, id_of, opened, tool_call_text
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.chat import ChatAgent
from tidegate.gateway.environments.client import OwnedEnvironments
from tidegate.types import Outcome, Task


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny", "qwen3")
    async with (
        service("Counter", workers=1) as environments,
        staged(model, environments=environments, journal=tmp_path / "journal") as made,
    ):
        yield made


async def test_an_episode_is_set_up_used_scored_and_torn_down(stage: Stage, tmp_path: Path) -> None:
    for text in (
        tool_call_text("add", number=2), "So?", tool_call_text("add", number=-1),
        tool_call_text("add", number=2), "Done.",
    ):  # fmt: skip
        stage.say(text)
    torn_down = tmp_path / "total"
    messages = [{"role": "user", "content": "Count to 4."}]
    task = Task("t", "counter", messages, info={"file": str(torn_down)})
    session = await opened(stage, task=task)
    output = await ChatAgent().run(task.view(), session)
    trajectory = await finished(stage, session, output=output)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 4.0, None)
    results = [(one.result, one.error) for one in trajectory.tool_calls]
    assert results == [("2", False), ("only numbers ≥ 0", True), ("4", False)]
    await eventually(lambda: torn_down.exists() and torn_down.read_text() == "4")


async def test_the_service_is_started_once(stage: Stage) -> None:
    environments = stage.gateway.options.environments
    assert isinstance(environments, OwnedEnvironments)
    sessions = [
        await opened(stage, task=Task("t", "counter", [{"role": "user", "content": "?"}])) for _ in range(8)
    ]
    workers = {int((await session.call(call("process")))["content"]) for session in sessions}
    services = {psutil.Process(worker).ppid() for worker in workers}
    await environments.start()
    children = psutil.Process().children()
    assert [child.pid for child in children if "env" in child.cmdline()] == list(services)


async def test_a_killed_worker_is_no_fault_of_the_agent(stage: Stage) -> None:
    task = Task("t", "counter", [{"role": "user", "content": "?"}])
    session = await opened(stage, task=task)
    process = int((await session.call(call("process")))["content"])
    os.kill(process, signal.SIGKILL)
    with pytest.raises(openai.APIStatusError, match="state is lost") as refused:
        await session.call(call("add", "2", number=1))
    assert refused.value.status_code == 424
    trajectory = await finished(stage, session, outcome="agent_error")
    assert trajectory.outcome is Outcome.INFRA_ERROR
    other = await opened(stage, task=task)
    assert (await other.call(call("add", number=1)))["content"] == "1", "a new worker serves"
    assert id_of(other) != id_of(session)
