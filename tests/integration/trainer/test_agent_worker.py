"""The agents' process and its owner: real processes, misbehaving agents, no leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tests.scripted_llm import scripted_llm, tool_call
from tidegate.errors import ConfigError, StartError
from tidegate.trainer.processes import agent_worker
from tidegate.trainer.processes.agent_worker import AgentResult, AgentWorker
from tidegate.types import Outcome, TaskView

AGENTS = '''
import asyncio, json, os, subprocess, sys, threading, time
from pathlib import Path
from tidegate.agents.base import Agent, Result, agent
from tidegate.errors import RetrievalUnavailable

@agent
async def many(task, session):
    """Does what the task says."""
    told = json.loads(task.messages[0]["content"])
    match told["do"]:
        case "answer":
            return Result("#### 4", 0.5, {"steps": 3})
        case "echo":
            return json.dumps([session.base_url, session.api_key, session.model, session.seed, task.id])
        case "none":
            return None
        case "raise":
            raise LookupError("lost in " + told["where"])
        case "unreachable":
            raise RetrievalUnavailable("no retrieval server answered")
        case "exit":
            sys.exit(4)
        case "die":
            os._exit(9)
        case "cancel itself":
            raise asyncio.CancelledError
        case "number":
            return 4
        case "much":
            return "x" * 900_000
        case "long":
            return "x" * 2_000_000
        case "metrics":
            return Result("x", metrics={str(one): 1.0 for one in range(1000)})
        case "surrogate":
            return "half \\ud800"
        case "flood":
            for _ in range(2000):
                print("x" * 1000)
            os.write(1, b'{"event": "done", "job": "flood"}\\n')
            subprocess.run(["echo", "from a child"])
            return "dry"
        case "meet":
            Path(told["fifo"]).write_text("here")
            await asyncio.sleep(600)
        case "stubborn":
            Path(told["fifo"]).write_text("here")
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        case "tidy":
            Path(told["fifo"]).write_text("here")
            try:
                await asyncio.sleep(600)
            finally:
                Path(told["fifo"]).write_text("tidied")
        case "block":
            if "fifo" in told:
                Path(told["fifo"]).write_text("here")
            time.sleep(600)
        case "pid":
            return str(os.getpid())

def blocking(task, session):
    time.sleep(600)
'''


def told(do: str, **more: Any) -> TaskView:
    return TaskView(f"task-{do}", [{"role": "user", "content": json.dumps({"do": do, **more})}])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "worst_agents.py"
    file.write_text(AGENTS)
    return file


@contextlib.asynccontextmanager
async def started(use: str, tmp_path: Path, **options: Any) -> AsyncIterator[AgentWorker]:
    worker = await AgentWorker.start(use, options, tmp_path / "logs" / "agent.log")
    try:
        yield worker
    finally:
        await worker.close()
        assert worker.pid is None


@pytest.fixture
async def worker(file: Path, tmp_path: Path) -> AsyncIterator[AgentWorker]:
    async with started(f"{file}:many", tmp_path) as worker:
        yield worker


numbers = iter(range(10**6))


async def run(worker: AgentWorker, view: TaskView, deadline_s: float = 30.0) -> AgentResult:
    return await worker.run(
        f"job-{next(numbers)}", view, base_url="http://gate/v1", api_key="key", model="policy", seed=3,
        deadline_s=deadline_s,
    )  # fmt: skip


async def met(fifo: Path) -> str:
    """What the agent wrote, once it has come so far."""
    return await asyncio.to_thread(fifo.read_text)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


async def test_a_run_ends_with_what_the_agent_returned(worker: AgentWorker) -> None:
    assert await run(worker, told("answer")) == AgentResult(None, "#### 4", 0.5, {"steps": 3.0}, None)
    assert await run(worker, told("none")) == AgentResult()
    echoed = json.loads((await run(worker, told("echo"))).output)
    assert echoed == ["http://gate/v1", "key", "policy", 3, "task-echo"]


async def test_large_tasks_pass(worker: AgentWorker) -> None:
    assert (await run(worker, told("answer", filler="x" * 3_000_000))).output == "#### 4"


async def test_large_outputs_pass(worker: AgentWorker) -> None:
    assert (await run(worker, told("much"))).output == "x" * 900_000


async def test_text_that_cannot_be_sent_is_made_so(worker: AgentWorker) -> None:
    assert (await run(worker, told("surrogate"))).output == "half ?"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "LookupError: lost in worst_agents"),
        ("exit", r"SystemExit\(4\)"),
        ("cancel itself", "cancelled itself"),
        ("number", "returned int"),
        ("long", "2,000,000 characters"),
        ("metrics", "has more than 100 metrics"),
    ],
)
async def test_what_goes_wrong_ends_that_run_alone(worker: AgentWorker, do: str, message: str) -> None:
    pid = worker.pid
    bad, good = await asyncio.gather(run(worker, told(do, where="worst_agents")), run(worker, told("answer")))
    assert bad.outcome is Outcome.AGENT_ERROR
    assert bad.output is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad.error)
    assert len(bad.error) < 5000
    assert good.outcome is None
    assert worker.pid == pid


async def test_an_error_says_where_and_the_log_has_all_of_it(worker: AgentWorker, tmp_path: Path) -> None:
    first, second, *_ = (await run(worker, told("raise", where="x"))).error.splitlines()
    assert first == "LookupError: lost in x"
    assert re.fullmatch(r"  .*worst_agents\.py:\d+, in \w+: raise LookupError\(.*", second), second
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert "Traceback (most recent call last):" in log
    assert "LookupError: lost in x" in log


async def test_a_service_that_is_away_is_not_the_agents_error(worker: AgentWorker) -> None:
    ended = await run(worker, told("unreachable"))
    assert ended.outcome is Outcome.INFRA_ERROR
    assert "no retrieval server answered" in ended.error


async def test_runs_do_not_wait_for_each_other(worker: AgentWorker, fifo: Path) -> None:
    waiting = asyncio.create_task(run(worker, told("meet", fifo=str(fifo))))
    await met(fifo)
    results = await asyncio.gather(*(run(worker, told("answer")) for _ in range(200)))
    assert all(result.output == "#### 4" for result in results)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("do", ["meet", "stubborn"])
async def test_a_run_is_ended_at_its_deadline(worker: AgentWorker, fifo: Path, do: str) -> None:
    late = asyncio.create_task(run(worker, told(do, fifo=str(fifo)), deadline_s=0.3))
    await met(fifo)
    result = await late
    assert (result.outcome, result.error) == (Outcome.TIMEOUT, "the agent did not return before its deadline")
    assert (await run(worker, told("answer"))).outcome is None
    assert worker.restarts == 0


async def test_a_function_that_blocks_its_thread_is_left_there(file: Path, tmp_path: Path) -> None:
    async with started(f"{file}:blocking", tmp_path) as worker:
        results = await asyncio.gather(*(run(worker, told("x"), deadline_s=0.2) for _ in range(50)))
        assert {result.outcome for result in results} == {Outcome.TIMEOUT}
        assert worker.restarts == 0


async def test_cancelling_the_call_cancels_the_run(worker: AgentWorker, fifo: Path) -> None:
    running = asyncio.create_task(run(worker, told("tidy", fifo=str(fifo))))
    assert await met(fifo) == "here"
    running.cancel()
    assert await met(fifo) == "tidied"
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_agent_that_blocks_the_process_costs_the_process(
    worker: AgentWorker, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_worker, "GRACE_S", 0.5)
    other = asyncio.create_task(run(worker, told("meet", fifo=str(fifo))))
    await met(fifo)
    blocked = await run(worker, told("block"), deadline_s=0.2)
    assert blocked.outcome is Outcome.TIMEOUT
    assert "blocked its process" in blocked.error
    assert await other == AgentResult(Outcome.CANCELLED, error="the agents' process exited")
    assert (await run(worker, told("answer"))).outcome is None
    assert worker.restarts == 1


async def test_the_death_of_the_process_ends_its_runs_and_the_next_gets_a_new_one(
    worker: AgentWorker, fifo: Path
) -> None:
    pid = worker.pid
    other = asyncio.create_task(run(worker, told("meet", fifo=str(fifo))))
    await met(fifo)
    died = AgentResult(Outcome.CANCELLED, error="the agents' process exited")
    assert await asyncio.gather(run(worker, told("die")), other) == [died, died]
    results = await asyncio.gather(*(run(worker, told("pid")) for _ in range(5)))
    assert len({result.output for result in results}) == 1
    assert int(results[0].output) == worker.pid != pid
    assert worker.restarts == 1


async def test_a_process_that_always_dies_is_given_up(worker: AgentWorker) -> None:
    for _ in range(agent_worker.MAX_RESTARTS):
        assert (await run(worker, told("die"))).outcome is Outcome.CANCELLED
    # A run that ends well begins the count again.
    assert (await run(worker, told("answer"))).outcome is None
    for _ in range(agent_worker.MAX_RESTARTS + 1):
        assert (await run(worker, told("die"))).outcome is Outcome.CANCELLED
    with pytest.raises(StartError, match="exited 6 times in a row"):
        await run(worker, told("answer"))


async def test_what_agents_print_goes_to_the_log_and_is_bounded(worker: AgentWorker, tmp_path: Path) -> None:
    assert (await run(worker, told("flood"))).output == "dry"
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert log.count("x" * 1000) == 2000
    assert '{"event": "done", "job": "flood"}' in log
    assert "from a child" in log


def test_a_log_takes_so_much_and_no_more() -> None:
    code = (
        "from tidegate.agents.worker import CappedLog; import sys\n"
        "sys.stdout = CappedLog(sys.stdout, 10)\n"
        "for _ in range(100): print('12345678')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "12345678\n1\n[the agents printed too much: the rest is dropped]\n"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        ("FILE:many_", ConfigError, "did you mean 'many'"),
        ("slover", ConfigError, "did you mean 'solver'"),
        ("BROKEN:x", ConfigError, r"cannot be loaded: ZeroDivisionError: .*broken\.py:1, in <module>"),
        ("DEADLY:x", StartError, "exited at start:\nlast words"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_is_reported_at_the_start(
    file: Path, tmp_path: Path, use: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "deadly.py").write_text(
        "import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(1)"
    )
    for word, name in (("FILE", file.name), ("BROKEN", "broken.py"), ("DEADLY", "deadly.py")):
        use = use.replace(word, str(tmp_path / name))
    with pytest.raises(error, match=message):
        await AgentWorker.start(use, {}, tmp_path / "agent.log")


async def test_closing_ends_the_runs_first(file: Path, tmp_path: Path, fifo: Path) -> None:
    worker = await AgentWorker.start(f"{file}:many", {}, tmp_path / "agent.log")
    running = asyncio.create_task(run(worker, told("tidy", fifo=str(fifo))))
    await met(fifo)
    closing = asyncio.create_task(worker.close())
    assert await met(fifo) == "tidied"
    await closing
    assert (await running).outcome is Outcome.CANCELLED
    await worker.close()
    with pytest.raises(StartError, match="was closed"):
        await run(worker, told("answer"))


@pytest.mark.parametrize("do", ["meet", "block"])
async def test_the_process_does_not_outlive_a_parent_that_was_killed(
    file: Path, tmp_path: Path, fifo: Path, do: str
) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"""
import asyncio
from pathlib import Path
from tests.integration.trainer.test_agent_worker import run, told
from tidegate.trainer.processes.agent_worker import AgentWorker

async def main():
    worker = await AgentWorker.start("{file}:many", {{}}, Path("{tmp_path}/agent.log"))
    print(worker.pid, flush=True)
    await run(worker, told("{do}", fifo="{fifo}"))

asyncio.run(main())
"""
    )
    root = REPO
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(parent),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    pid = int(await process.stdout.readline())
    await met(fifo)
    fd = os.pidfd_open(pid)
    process.kill()
    await process.wait()
    await readable(fd, seconds=20)


async def readable(fd: int, seconds: float) -> None:
    """Wait until the process of a pidfd has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def test_ctrl_c_is_the_owners_alone(worker: AgentWorker) -> None:
    assert worker.pid is not None
    assert os.getsid(worker.pid) != os.getsid(0)


async def test_the_solver_in_its_process(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return {"content": f"#### {body['messages'][-1]['content']}"}
        return tool_call("calculator", {"expression": body["messages"][-1]["content"]})

    async with scripted_llm(reply) as (url, requests), started("solver", tmp_path, max_turns=3) as worker:
        results = await asyncio.gather(*(solve(worker, url, number) for number in range(64)))
    assert [result.output for result in results] == [f"#### {number + 1}" for number in range(64)]
    assert all(result.metrics["tool_calls"] == 1.0 for result in results)
    assert len(requests) == 128


def solve(worker: AgentWorker, url: str, number: int) -> Awaitable[AgentResult]:
    view = TaskView(str(number), [{"role": "user", "content": f"{number} + 1"}])
    return worker.run(
        f"solve-{number}", view, base_url=url, api_key="key", model="policy", seed=None, deadline_s=60.0
    )
