"""The environment of the shell demo in real sandboxes: solutions, wrong final states, attempts to cheat."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.shell.env import CHECK, Shell, drawn
from examples.shell.file_tasks import KINDS, draw_task
from tests.fakes import staged
from tests.integration.gateway.test_environments import finished, opened, tool_call_text
from tests.sandboxes import needs_bubblewrap
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.chat import ShellAgent
from tidegate.envs.shell.sandboxed import NO_OUTPUT
from tidegate.gateway.environments.client import OwnedEnvironments
from tidegate.sandbox import open_sandbox
from tidegate.types import Outcome, Task

pytestmark = needs_bubblewrap
SHELL = Shell()


def task_of(kind: str) -> tuple[Task, list[str]]:
    """A task of this kind, and the commands of its solution."""
    index = next(index for index in range(100) if SHELL.train_task(index).info["kind"] == kind)
    return SHELL.train_task(index), [step.command for step in drawn(0, "train", index).steps]


async def reward_of(task: Task, commands: list[str]) -> float:
    state = await SHELL.setup(task)
    try:
        for command in commands:
            await SHELL.bash(state, command)
        return (await SHELL.await_rewards(task, None, "done", [], state))["solved"].value
    finally:
        await SHELL.teardown(state)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_solutions_of_fifty_tasks(kind: Any) -> None:
    """Their commands have the outputs that the tasks give, and lead to the expected files."""
    tasks = [draw_task(Random(f"solutions/{n}"), "held_out" if n % 2 else "train", kind) for n in range(50)]
    files, script, outputs = {}, [], []
    for n, task in enumerate(tasks):
        files |= {f"tasks/{n}/{path}": content for path, content in task.before.items()}
        files |= {f"expected/{n}/{path}": content for path, content in task.after.items()}
        script += [f"cd /work/tasks/{n}", *(step.command for step in task.steps)]
        outputs += [step.output for step in task.steps if step.output]
    async with await open_sandbox(files=files) as box:
        solved = await box.run(["bash", "-c", "\n".join(script)])
        assert (solved.stdout.splitlines(), solved.stderr) == ("\n".join(outputs).splitlines(), "")
        compared = await box.run([*CHECK[:-1], "expected", "tasks"])
        assert (compared.exit_code, compared.stdout) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_whole_solution_is_worth_1(kind: str) -> None:
    task, commands = task_of(kind)
    assert await reward_of(task, commands) == 1.0
    assert await reward_of(task, commands[:-1]) == 0.0


@pytest.mark.parametrize("command", ["touch more", "rm -r *", "echo x >> $(ls *.* | head -1)", "mkdir empty"])
async def test_other_changes_are_not_accepted(command: str) -> None:
    task, commands = task_of("find")
    assert await reward_of(task, [*commands, command]) == 0.0


CHEATS = {
    "a process that continues": (
        "(setsid sh -c 'while :; do cp /tmp/expected/answer.txt /work; mkdir -p /tmp/expected; done' &) "
        ">/dev/null 2>&1"
    ),
    "a verifier of one's own": (
        "mkdir -p bin && printf '#!/bin/sh\\nexit 0\\n' > bin/diff && chmod +x bin/diff; "
        "cp bin/diff .; cp bin/diff /tmp; echo PATH=/work:/work/bin:$PATH | tee .profile .bashrc"
    ),
    "a shell's start file": "echo 'exit 0' | tee .bashrc .profile .env; export BASH_ENV=/work/.env",
    "a folder in place of the expected files": "mkdir -p /tmp/expected; cp -r . /tmp/expected",
    "a link to the expected files": "rm -r *; ln -s /tmp/expected/answer.txt .; ln -s /tmp/expected/* .",
    "a link in place of the folder": "rm -rf /work; ln -s /tmp/expected /work",
    "options as file names": "touch -- --help --version; echo x > '-q'",
    "a FIFO": "mkfifo answer.txt",
    "files without end": "truncate -s 1T answer.txt",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_attempts_to_cheat_are_worth_nothing(name: str) -> None:
    task, _ = task_of("count")
    assert await reward_of(task, [CHEATS[name]]) == 0.0


async def test_the_agents_process_cannot_see_the_expected_files() -> None:
    task, _ = task_of("count")
    state = await SHELL.setup(task)
    try:
        await SHELL.bash(
            state, "(setsid sh -c 'while sleep 0.01; do cp -r /tmp/expected /work; done' &) >/dev/null 2>&1"
        )
        await SHELL.await_rewards(task, None, "done", [], state)
        assert "expected" not in await SHELL.bash(state, "ls /work")
    finally:
        await SHELL.teardown(state)


async def test_an_episode_by_the_gateway(tmp_path: Path) -> None:
    """The agent `shell` sends the model's commands to the sandbox and returns their outputs."""
    task, commands = task_of("move")
    use = "--env.use=examples/shell/env.py:Shell"
    environments = OwnedEnvironments([use], {"options": {"output_chars": 50}})
    await environments.start()
    try:
        async with staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=environments) as stage:
            for command in ["for n in $(seq 99); do echo $n; done; exit 3", *commands]:
                stage.say(tool_call_text("bash", command=command))
            stage.say("Done.")
            session = await opened(stage, task=task)
            output = await ShellAgent(max_turns=8).run(task.view(), session)
            trajectory = await finished(stage, session, output=output, reward=None)
    finally:
        await environments.close()
    assert (output, trajectory.outcome, trajectory.reward) == ("Done.", Outcome.COMPLETED, 1.0)
    assert len(trajectory.turns) == 5
    assert [call.name for call in trajectory.tool_calls] == ["bash"] * 4
    first, *results = [one["content"] for one in trajectory.messages if one["role"] == "tool"]
    assert "characters left out]" in first
    assert first.endswith("[exit status 3]")
    assert results == [step.output or NO_OUTPUT for step in drawn(0, "train", int(task.id[6:])).steps]
    assert trajectory.messages[0]["role"] == "system"
