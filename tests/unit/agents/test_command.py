"""Any program as an agent: its environment, its output, and cleanup of its processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tidegate.agents.base import Result, Session
from tidegate.agents.command import MAX_STDOUT, CommandAgent, _Program
from tidegate.errors import ConfigError
from tidegate.tracebacks import describe_error
from tidegate.types import TaskView

TASK = TaskView(
    "t-1", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many? é"}]
)


def session() -> Session:
    return Session("http://gate/s/1/v1", "key-1", "policy", 7, time.monotonic() + 30)


def python(code: str, **env: str) -> CommandAgent:
    return CommandAgent([sys.executable, "-c", code], env)


async def test_a_command_receives_the_endpoint_and_the_task() -> None:
    names = [
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "TIDEGATE_MCP_URL",
        "MODEL",
        "SEED",
        "OWN",
    ]
    code = f"""if True:
        import json, os, sys
        seen = {{name: os.environ[name] for name in {names}}}
        seen["task"] = json.load(open(os.environ["TASK_FILE"]))
        seen["stdin"] = sys.stdin.buffer.read().decode()
        seen["cwd"] = os.listdir()
        print(json.dumps(seen))"""
    seen = json.loads((await python(code, OWN="mine").run(TASK, session())).output)
    assert seen == {
        "OPENAI_BASE_URL": "http://gate/s/1/v1",
        "OPENAI_API_KEY": "key-1",
        "ANTHROPIC_BASE_URL": "http://gate/s/1",
        "ANTHROPIC_API_KEY": "key-1",
        "TIDEGATE_MCP_URL": "http://gate/s/1/mcp",
        "MODEL": "policy",
        "SEED": "7",
        "OWN": "mine",
        "task": {"id": "t-1", "messages": list(TASK.messages)},
        "stdin": "how many? é",
        "cwd": ["task.json"],
    }


async def test_a_result_file_comes_before_stdout() -> None:
    said = {"output": "#### 4", "reward": 0.5, "metrics": {"steps": 3}}
    code = f"import os; print('noise'); open(os.environ['RESULT_FILE'], 'w').write('''{json.dumps(said)}''')"
    assert await python(code).run(TASK, session()) == Result("#### 4", 0.5, {"steps": 3})


@pytest.mark.parametrize("said", ["not json", "[]", "{}"])
async def test_a_bad_result_file_is_an_error(said: str) -> None:
    code = f"import os; open(os.environ['RESULT_FILE'], 'w').write('{said}')"
    with pytest.raises(ValueError, match="RESULT_FILE is not JSON"):
        await python(code).run(TASK, session())


async def test_a_bad_status_is_an_error_with_its_last_words_and_no_frames_of_tidegate() -> None:
    agent = python("import sys; print('out of luck', file=sys.stderr); sys.exit(3)")
    [result] = await asyncio.gather(agent.run(TASK, session()), return_exceptions=True)
    assert isinstance(result, RuntimeError)
    result.__traceback__ = result.__traceback__ and result.__traceback__.tb_next  # of this test
    assert describe_error(result, 999) == (
        f"RuntimeError: {agent.command[0]} exited with status 3: out of luck"
    )


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["no-such-program"], "there is no program 'no-such-program': looked for it in PATH (/"),
        (["./no-such"], "there is no program './no-such': looked for it at {here}/no-such"),
        (["sh", "agent.sh"], "the script 'agent.sh' does not exist: there is no {here}/agent.sh"),
        ([sys.executable, "-u", "sub/agent.py", "--out", "x.py"], "there is no {here}/sub/agent.py"),
        (["./there.py"], "there.py is not executable: run chmod +x"),
        (["env", "out.py"], None),
        (["sh", "https://agents.example/agent.sh"], None),
        (["sh", "-r", "dotenv/config.js", "new.js"], None),
        (["sh", "--directory", "sub", "new.py"], None),
        (["sh", "-ec", "cat new.py"], None),
        (["sh", "-c", "new.py"], None),
        ([sys.executable, "-m", "json.tool", "new.py"], None),
        ([sys.executable, "there.py", "new.py"], None),
        (["sh", "there.sh"], None),
    ],
)
def test_a_program_or_script_that_does_not_exist_is_refused_with_the_path(
    command: list[str], missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there.py", "there.sh"):
        (tmp_path / name).touch()
    if missing is None:
        CommandAgent(command)
        return
    with pytest.raises(ConfigError) as raised:
        CommandAgent(command)
    assert missing.format(here=tmp_path) in str(raised.value)


def test_a_program_is_looked_for_in_the_path_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "own-agent").touch(0o755)
    CommandAgent(["own-agent"], env={"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=rf"'sh': looked for it in PATH \({tmp_path}\)"):
        CommandAgent(["sh"], env={"PATH": str(tmp_path)})


def test_the_program_and_explicit_paths_are_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.js").touch(0o755)
    agent = CommandAgent(["agent.js", "agent.js", "./agent.js", "./missing", "-c"])
    path = str(tmp_path / "agent.js")
    assert agent.command == [path, path, path, "./missing", "-c"]


async def test_the_end_of_a_long_output_is_kept() -> None:
    code = "import sys\nfor _ in range(300): sys.stdout.write('x' * 10_000)\nprint('#### 9')"
    output = (await python(code).run(TASK, session())).output
    assert len(output) == MAX_STDOUT
    assert output.endswith("#### 9\n")


async def test_a_long_output_takes_no_memory() -> None:
    program = _Program()
    for _ in range(100):
        program.pipe_data_received(1, b"x" * 100_000)
    assert len(program._output[1]) <= 2 * MAX_STDOUT


async def test_a_program_need_not_read_its_input() -> None:
    long = TaskView("t", [{"role": "user", "content": "x" * 1_000_000}])
    code = "import os; os.close(0); print('done')"
    assert (await python(code).run(long, session())).output == "done\n"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


SPAWNS = """if True:
    import os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["PIDS"], "w") as pids:
        pids.write(f"{os.getpid()} {child.pid}\\n")
"""


async def spawned(fifo: str) -> list[int]:
    """The processes' ids, as soon as they are there."""
    return [int(pid) for pid in (await asyncio.to_thread(Path(fifo).read_text)).split()]


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while alive(pid):  # noqa: ASYNC110 - nobody here is told of the end of another's child
            await asyncio.sleep(0.01)


async def test_cancelling_ends_the_whole_group(tmp_path: Path) -> None:
    fifo = str(tmp_path / "pids")
    os.mkfifo(fifo)
    run = asyncio.create_task(python(SPAWNS + "    child.wait()", PIDS=fifo).run(TASK, session()))
    pids = await spawned(fifo)
    assert all(map(alive, pids))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    for pid in pids:
        await gone(pid)


async def test_a_child_left_behind_is_ended(tmp_path: Path) -> None:
    fifo = str(tmp_path / "pids")
    os.mkfifo(fifo)
    run = asyncio.create_task(python(SPAWNS + "    print('done')", PIDS=fifo).run(TASK, session()))
    pids = await spawned(fifo)
    assert (await run).output == "done\n"
    for pid in pids:
        await gone(pid)
