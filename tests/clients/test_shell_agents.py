"""Coding agents in sandboxes of their own work in the shell of an episode; the replies are scripted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.shell.env import Shell, drawn
from tests import REPO
from tests.clients.support import DEADLINE_S, NODE, call, python, scripted
from tests.environments import LocalEnvironments
from tests.sandboxes import needs_bubblewrap
from tidegate.agents.base import Session
from tidegate.agents.command import CommandAgent
from tidegate.types import Outcome, Sampling, Trajectory

pytestmark = [pytest.mark.clients, needs_bubblewrap]
AGENTS = REPO / "examples" / "shell" / "agents"
BIN = NODE.resolve() / ".bin"
STEPS = drawn(0, "train", 0).steps
DONE = "I have done it."


async def episode(
    folder: Path, tool: str, last: str, command: list[str], read_only: list[str], env: dict[str, str]
) -> Trajectory:
    """An episode of the first training task, which the scripted replies solve."""
    shell = Shell()
    task = shell.train_task(0)
    replies = [*(call(tool, command=step.command) for step in STEPS), last]
    agent = CommandAgent(
        command,
        env,
        sandbox="bubblewrap",
        read_only=read_only,
        limits={"memory_mb": 4096, "disk_mb": 1024, "processes": 256},
    )
    async with scripted(folder, replies, environments=LocalEnvironments(shell)) as stage:
        access = await stage.client.open_session(
            task=task, env=task.env, deadline_s=DEADLINE_S, sampling=Sampling(1.0, max_tokens=4000)
        )
        session = Session(access.base_url, access.api_key, "policy", 0, time.monotonic() + DEADLINE_S)
        result = await agent.run(task.view(), session)
        await stage.client.finish(access.session_id, output=result.output)
        return await stage.client.trajectory(access.session_id)


def assert_solved(trajectory: Trajectory, commands: int) -> None:
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0), trajectory.messages
    assert [one.name for one in trajectory.tool_calls] == ["bash"] * commands
    assert trajectory.tool_calls[0].result == STEPS[0].output


async def test_claude_code(tmp_path: Path) -> None:
    command = ["/bin/sh", str(AGENTS / "claude_code.sh"), str(BIN / "claude")]
    trajectory = await episode(tmp_path, "mcp__env__bash", DONE, command, [str(NODE.resolve())], {})
    assert_solved(trajectory, len(STEPS))
    assert DONE in (trajectory.output or "")


async def test_codex(tmp_path: Path) -> None:
    command = ["/bin/sh", str(AGENTS / "codex.sh"), str(BIN / "codex")]
    trajectory = await episode(
        tmp_path, "mcp__env.bash", DONE, command, [str(NODE.resolve())], {"PATH": f"{BIN}:/usr/bin:/bin"}
    )
    assert_solved(trajectory, len(STEPS))
    assert DONE in (trajectory.output or "")


async def test_mini_swe_agent(tmp_path: Path) -> None:
    interpreter = python("agents-litellm")
    environment = str(Path(interpreter).parents[1].resolve())
    command = [f"{environment}/bin/python", str(AGENTS / "mini_swe_agent.py")]
    last = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo submitted")
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    trajectory = await episode(tmp_path, "bash", last, command, [environment], env)
    assert_solved(trajectory, len(STEPS) + 1)
    assert (trajectory.output or "").endswith("submitted\n")
