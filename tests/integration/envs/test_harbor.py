"""Task folders in Harbor's format in real sandboxes: solutions, and rewards that an agent writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import REPO
from tests.sandboxes import needs_bubblewrap
from tidegate.envs.rewards import Grade
from tidegate.envs.shell.harbor import Harbor
from tidegate.errors import RewardError
from tidegate.types import Task

pytestmark = needs_bubblewrap
TASKS = REPO / "examples" / "shell" / "tasks"
HARBOR = Harbor(path=str(TASKS / "train"), eval_path=str(TASKS / "held_out"))
EXAMPLES = {task.id: task for task in (HARBOR.train_task(0), HARBOR.train_task(1), *HARBOR.eval_sets()[""])}


async def played(environment: Harbor, task: Task, *commands: str) -> tuple[Grade, list[str]]:
    """The grade after some commands, and their outputs."""
    state = await environment.setup(task)
    try:
        outputs = [await environment.bash(state, command) for command in commands]
        return (await environment.await_rewards(task, None, "done", [], state))["reward"], outputs
    finally:
        await environment.teardown(state)


def folder_of(parent: Path, name: str = "task", **files: str) -> Path:
    """Writes a task; `files` have `__` in place of `/` and `_` in place of `.`."""
    texts = {
        "task_toml": "",
        "instruction_md": "Do it.",
        "tests__test_sh": "",
        "environment__a_txt": "a",
        **files,
    }
    for key, text in texts.items():
        path = parent / name / key.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parent / name


def only(path: Path) -> tuple[Harbor, Task]:
    environment = Harbor(path=str(path), eval_path=str(path))
    return environment, environment.train_task(0)


def test_the_examples_are_read() -> None:
    assert sorted(EXAMPLES) == ["collect-backups", "mend-script", "sum-invoices"]
    assert EXAMPLES["mend-script"].messages[0]["content"].startswith("`./greet NAME` should print")


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_solution_is_worth_1(name: str) -> None:
    task = EXAMPLES[name]
    grade, _ = await played(HARBOR, task, (Path(task.info["folder"]) / "solution" / "solve.sh").read_text())
    assert grade.value == 1.0
    grade, _ = await played(HARBOR, task)
    assert grade.value == 0.0


async def test_an_object_of_rewards_also_has_metrics() -> None:
    mended = "printf '#!/bin/sh\\nset -- $*\\necho \"Hello, $1!\"\\n' > greet"
    grade, _ = await played(HARBOR, EXAMPLES["mend-script"], mended)
    assert grade == Grade(0.5, {"without_reward": 0.0, "single": 1.0, "blank": 0.0})


async def test_the_working_folder_and_the_variables_are_those_of_the_task(tmp_path: Path) -> None:
    path = folder_of(
        tmp_path,
        task_toml='environment.env = {COLOUR = "red"}\nverifier.env = {SHAPE = "a $round one"}',
        environment__Dockerfile="FROM debian\nWORKDIR /home/me/shop\nCOPY . .\n",
        tests__test_sh="[ \"$(pwd) $COLOUR $SHAPE\" = '/home/me/shop red a $round one' ] && [ -f a.txt ] && "
        "echo 1 > /logs/verifier/reward.txt",
    )
    path.joinpath("environment/a.txt").chmod(0o755)
    grade, outputs = await played(*only(path), "pwd; echo $COLOUR$SHAPE; ls -F; cat /home/me/shop/a.txt")
    assert outputs == ["/home/me/shop\nred\na.txt*\na"]
    assert grade.value == 1.0


@pytest.mark.parametrize(
    "attempt",
    [
        "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "mkdir -p tests logs/verifier && echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh",
        "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "(setsid sh -c 'while sleep 0.01; do echo 1 > /logs/verifier/reward.txt; done' &) >/dev/null 2>&1",
    ],
)
async def test_a_reward_that_the_agent_writes_does_not_count(attempt: str) -> None:
    grade, _ = await played(HARBOR, EXAMPLES["sum-invoices"], attempt)
    assert grade.value == 0.0


@pytest.mark.parametrize(
    "test",
    ["exit 0", "echo > /logs/verifier/reward.txt", "echo nan > /logs/verifier/reward.txt", "kill -9 $$"],
)
async def test_a_test_script_without_a_reward_is_an_error_with_its_output(tmp_path: Path, test: str) -> None:
    folder = folder_of(tmp_path, tests__test_sh=f"echo no uv here; {test}")
    with pytest.raises(RewardError, match=r"test\.sh wrote no reward.*no uv here"):
        await played(*only(folder))


@pytest.mark.parametrize("test", ["sleep 60", "exec head -c 2000000000 /dev/zero > big"])
async def test_work_with_which_the_tests_exceed_a_limit_is_worth_0(tmp_path: Path, test: str) -> None:
    path = folder_of(tmp_path, task_toml="verifier.timeout_sec = 0.5", tests__test_sh=test)
    grade, _ = await played(*only(path))
    assert grade == Grade(0.0, {"without_reward": 1.0})


async def test_of_both_files_the_one_with_the_reward_counts(tmp_path: Path) -> None:
    test = 'cd /logs/verifier; echo \'{"passed": 3, "total": 4}\' > reward.json; echo .75 > reward.txt'
    grade, _ = await played(*only(folder_of(tmp_path, tests__test_sh=test)))
    assert grade == Grade(0.75, {"without_reward": 0.0, "passed": 3.0, "total": 4.0})
