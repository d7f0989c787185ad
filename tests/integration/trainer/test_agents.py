"""The agents' process and its supervisor: real processes, misbehaving agents, no leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import REPO
from tests.agents_process import Agents, started
from tests.fakes import staged
from tests.scripted_llm import scripted_llm, tool_call
from tests.tiny_tokenizer import make_model_dir
from tidegate.errors import ConfigError, StartError
from tidegate.gateway.client import GatewayClient
from tidegate.settings.run import AgentSettings
from tidegate.trainer.processes import agents as agent_processes
from tidegate.trainer.processes.agents import AgentProcess, GatewayWorkers, supervise_agents
from tidegate.trainer.processes.provider import GatewayAccess
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.types import Outcome, Sampling, Task, TaskView

AGENTS = '''
import asyncio, json, os, subprocess, sys, threading, time
from pathlib import Path
from tests.interpreter_lock import hold_interpreter_lock
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
        case "hold":
            hold_interpreter_lock()
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


@pytest.fixture
async def worker(file: Path, tmp_path: Path) -> AsyncIterator[Agents]:
    async with started(f"{file}:many", tmp_path) as worker:
        yield worker


SHARED = pytest.mark.asyncio(loop_scope="module")
"""Marks tests that use one process, which outlives them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Agents]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "worst_agents.py").write_text(AGENTS)
    async with started(f"{folder}/worst_agents.py:many", folder) as worker:
        yield worker


def log_of(worker: Agents) -> str:
    assert worker.process.log is not None
    return worker.process.log.read_text()


async def met(fifo: Path) -> str:
    """What the agent wrote, once it has come so far."""
    return await asyncio.to_thread(fifo.read_text)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@SHARED
async def test_a_run_ends_with_what_the_agent_returned(shared: Agents) -> None:
    nothing = {"outcome": None, "output": None, "reward": None, "metrics": {}, "error": None}
    answer = {"output": "#### 4", "reward": 0.5, "metrics": {"steps": 3.0}}
    assert await shared.run(told("answer")) == nothing | answer
    assert await shared.run(told("none")) == nothing
    echoed = json.loads((await shared.run(told("echo")))["output"])
    assert echoed == ["http://gate/v1", "key", "policy", 3, "task-echo"]
    assert (await shared.run(told("answer", filler="x" * 3_000_000)))["output"] == "#### 4", "a large task"
    assert (await shared.run(told("much")))["output"] == "x" * 900_000
    assert (await shared.run(told("surrogate")))["output"] == "half ?", "text that cannot be sent is made so"
    away = await shared.run(told("unreachable"))
    assert away["outcome"] == "infra_error", "a service that is away is not the agent's error"
    assert "no retrieval server answered" in away["error"]
    assert shared.process.pid is not None
    assert os.getsid(shared.process.pid) != os.getsid(0), "Ctrl-C is the owner's alone"


WRONG = {
    "raise": "LookupError: lost in worst_agents",
    "exit": r"SystemExit\(4\)",
    "cancel itself": "cancelled itself",
    "number": "returned int",
    "long": "2,000,000 characters",
    "metrics": "the limit is 100 metrics",
}


@SHARED
async def test_what_goes_wrong_ends_that_run_alone(shared: Agents) -> None:
    pid = shared.process.pid
    for do, message in WRONG.items():
        bad, good = await asyncio.gather(
            shared.run(told(do, where="worst_agents")), shared.run(told("answer"))
        )
        assert bad["outcome"] == "agent_error", do
        assert bad["output"] is None
        assert re.search(message, bad["error"])
        assert len(bad["error"]) < 5000
        assert good["outcome"] is None
        assert shared.process.pid == pid


@SHARED
async def test_an_error_says_where_and_the_log_has_all_of_it(shared: Agents) -> None:
    first, second, *_ = (await shared.run(told("raise", where="x")))["error"].splitlines()
    assert first == "LookupError: lost in x"
    assert re.fullmatch(r"  .*worst_agents\.py:\d+, in \w+: raise LookupError\(.*", second), second
    log = log_of(shared)
    assert "Traceback (most recent call last):" in log
    assert "LookupError: lost in x" in log


@SHARED
async def test_runs_do_not_wait_for_each_other(shared: Agents, fifo: Path) -> None:
    waiting = asyncio.create_task(shared.run(told("meet", fifo=str(fifo))))
    await met(fifo)
    results = await asyncio.gather(*(shared.run(told("answer")) for _ in range(200)))
    assert all(result["output"] == "#### 4" for result in results)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@SHARED
async def test_a_run_is_ended_at_its_deadline(shared: Agents, fifo: Path) -> None:
    for do in ("meet", "stubborn"):
        late = asyncio.create_task(shared.run(told(do, fifo=str(fifo)), deadline_s=0.3))
        await met(fifo)
        ended = await late
        why = "the agent did not return before its deadline"
        assert (ended["outcome"], ended["error"]) == ("timeout", why), do
        assert (await shared.run(told("answer")))["outcome"] is None
    assert shared.process.restarts == 0


async def test_a_function_that_blocks_its_thread_is_left_there(file: Path, tmp_path: Path) -> None:
    async with started(f"{file}:blocking", tmp_path) as worker:
        results = await asyncio.gather(*(worker.run(told("x"), deadline_s=0.2) for _ in range(50)))
        assert {result["outcome"] for result in results} == {"timeout"}
        assert worker.process.restarts == 0


async def test_the_death_of_the_process_ends_its_runs_and_the_next_gets_a_new_one(
    worker: Agents, fifo: Path
) -> None:
    pid = worker.process.pid
    other = asyncio.create_task(worker.run(told("meet", fifo=str(fifo))))
    await met(fifo)
    died = {"outcome": "cancelled", "error": "the agents' process exited"}
    assert await asyncio.gather(worker.run(told("die")), other) == [died, died]
    results = await asyncio.gather(*(worker.run(told("pid")) for _ in range(5)))
    assert len({result["output"] for result in results}) == 1
    assert int(results[0]["output"]) == worker.process.pid != pid
    assert worker.process.restarts == 1


async def test_a_process_that_always_dies_is_given_up(
    worker: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_processes, "MAX_RESTARTS", 1)
    for _ in range(agent_processes.MAX_RESTARTS):
        assert (await worker.run(told("die")))["outcome"] == "cancelled"
    # A run that ends well begins the count again.
    assert (await worker.run(told("answer")))["outcome"] is None
    for _ in range(agent_processes.MAX_RESTARTS + 1):
        assert (await worker.run(told("die")))["outcome"] == "cancelled"
    with pytest.raises(StartError, match="ended with exit code 9, 2 times in a row"):
        await worker.run(told("answer"))


@SHARED
async def test_what_agents_print_goes_to_the_log_and_is_bounded(shared: Agents) -> None:
    assert (await shared.run(told("flood")))["output"] == "dry"
    log = log_of(shared)
    assert log.count("x" * 1000) == 2000
    assert '{"event": "done", "job": "flood"}' in log
    assert "from a child" in log


def test_a_log_takes_so_much_and_no_more() -> None:
    code = (
        "from tidegate.agents.episode_runner import CappedLog; import sys\n"
        "sys.stdout = CappedLog(sys.stdout, 10)\n"
        "for _ in range(100): print('12345678')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "12345678\n1\n[the agents printed too much: the rest is dropped]\n"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        ("FILE:many_", ConfigError, "did you mean 'many'"),
        ("DEADLY:x", StartError, "the agent did not start: last words"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_is_reported_at_the_start(
    file: Path, tmp_path: Path, use: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(1)"
    )
    for word, name in (("FILE", file.name), ("DEADLY", "deadly.py")):
        use = use.replace(word, str(tmp_path / name))
    with pytest.raises(error, match=message):
        async with started(use, tmp_path):
            pass


async def test_the_process_does_not_outlive_a_parent_that_was_killed(
    file: Path, tmp_path: Path, fifo: Path
) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"""
import asyncio
from pathlib import Path
from tests.agents_process import started
from tidegate.types import TaskView

async def main():
    async with started("{file}:many", Path("{tmp_path}")) as worker:
        print(worker.process.pid, flush=True)
        await worker.run(TaskView("t", {list(told("block", fifo=str(fifo)).messages)}))

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


async def test_the_solver_in_its_process(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return {"content": f"#### {body['messages'][-1]['content']}"}
        return tool_call("calculator", {"expression": body["messages"][-1]["content"]})

    async with scripted_llm(reply) as (url, requests), started("solver", tmp_path, max_turns=3) as worker:
        results = await asyncio.gather(*(solve(worker, url, number) for number in range(64)))
    assert [result["output"] for result in results] == [f"#### {number + 1}" for number in range(64)]
    assert all(result["metrics"]["tool_calls"] == 1.0 for result in results)
    assert len(requests) == 128


def solve(worker: Agents, url: str, number: int) -> Awaitable[dict[str, Any]]:
    view = TaskView(str(number), [{"role": "user", "content": f"{number} + 1"}])
    return worker.run(view, 60.0, base_url=url, seed=None)


# -- at a gateway


@contextlib.asynccontextmanager
async def at_gateway(use: str, tmp_path: Path) -> AsyncIterator[tuple[GatewayClient, AgentProcess]]:
    """A gateway, and an agents' process that takes its attempts, supervised."""
    async with staged(make_model_dir(tmp_path / "tiny")) as stage:
        access = GatewayAccess(stage.url, stage.client.agents_key)
        process = AgentProcess(AgentSettings(use=use), access, tmp_path, "agent")
        async with GatewayClient(*access) as workers:
            supervising = None
            try:
                await process.start()
                supervising = asyncio.create_task(
                    supervise_agents(process, GatewayWorkers(stage.client, workers), lambda _: None)
                )
                yield stage.client, process
            finally:
                if supervising is not None:
                    supervising.cancel()
                    await asyncio.gather(supervising, return_exceptions=True)
                await process.stop()


def episode(client: GatewayClient, view: TaskView, **options: Any) -> asyncio.Task[Any]:
    source = EpisodeSource(client, 60.0)
    task = Task(view.id, "none", list(view.messages))
    return asyncio.create_task(source.run(view.id, task, Sampling(), "train", seed=3, **options))


async def polling(client: GatewayClient, worker: str) -> None:
    """Wait until a worker's poll waits at the gateway."""
    async with asyncio.timeout(30):
        while True:
            rows = (await client.attempts())["workers"]
            if any(row["worker"] == worker and row["polling"] for row in rows):
                return
            await asyncio.sleep(0.01)  # there is no event to wait for


async def test_cancelling_an_episode_ends_it_at_once(file: Path, tmp_path: Path, fifo: Path) -> None:
    """An episode of a group is ended by the drop of its group, which follows."""
    async with at_gateway(f"{file}:many", tmp_path) as (client, _):
        for group in ("g1", None):
            options = {} if group is None else {"group_id": group, "slot": 0}
            running = episode(client, told("tidy", fifo=str(fifo)), **options)
            assert await met(fifo) == "here"
            running.cancel()
            if group is not None:
                await client.drop_group(group)
            async with asyncio.timeout(5):
                assert await met(fifo) == "tidied"


async def test_the_episodes_of_a_process_that_exits_end_cancelled_and_the_next_one_runs(
    file: Path, tmp_path: Path, fifo: Path
) -> None:
    async with at_gateway(f"{file}:many", tmp_path) as (client, process):
        other = episode(client, told("meet", fifo=str(fifo)))
        await met(fifo)
        died = await episode(client, told("die"))
        assert (died.outcome, (await other).outcome) == (Outcome.CANCELLED, Outcome.CANCELLED)
        assert str(died.error).startswith("worker agent-")
        raised = await episode(client, told("raise", where="x"))
        assert raised.outcome is Outcome.AGENT_ERROR
        assert str(raised.error).startswith("LookupError: lost in x\n")
        assert process.restarts == 1


async def test_a_process_that_was_stopped_is_replaced(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_processes, "CHECK_S", 0.1)
    async with at_gateway(f"{file}:many", tmp_path) as (client, process):
        assert (await episode(client, told("none"))).outcome is Outcome.AGENT_ERROR
        await polling(client, process.url)  # else the next process would take the attempt
        process.signal(signal.SIGSTOP)
        view = told("none")
        source = EpisodeSource(client, 0.3)
        late = await source.run(view.id, Task(view.id, "none", list(view.messages)), Sampling(), "train")
        assert late.outcome is Outcome.TIMEOUT, "its poll was still waiting"
        assert (await episode(client, told("none"))).outcome is Outcome.AGENT_ERROR
        assert process.restarts == 1


async def test_stopping_the_process_gives_its_episodes_back(file: Path, tmp_path: Path, fifo: Path) -> None:
    async with at_gateway(f"{file}:many", tmp_path) as (client, process):
        running = episode(client, told("tidy", fifo=str(fifo)))
        await met(fifo)
        stopping = asyncio.create_task(process.stop())
        assert await met(fifo) == "tidied"
        await stopping
        assert (await running).outcome is Outcome.CANCELLED


@pytest.mark.parametrize(
    ("do", "error"), [("block", "blocked its process"), ("hold", "did not return before its deadline")]
)
async def test_an_agent_that_blocks_its_process_times_out_and_the_process_is_replaced(
    file: Path, tmp_path: Path, fifo: Path, do: str, error: str
) -> None:
    async with at_gateway(f"{file}:many", tmp_path) as (client, process):
        other = episode(client, told("meet", fifo=str(fifo)))
        await met(fifo)
        view = told(do)
        source = EpisodeSource(client, 0.3)
        blocked = await source.run(view.id, Task(view.id, "none", list(view.messages)), Sampling(), "train")
        assert blocked.outcome is Outcome.TIMEOUT
        assert error in str(blocked.error)
        assert (await other).outcome is Outcome.CANCELLED
        assert (await episode(client, told("none"))).outcome is Outcome.AGENT_ERROR, "it made no call"
        assert process.restarts == 1
    log = (tmp_path / "logs" / "agent.log").read_text()
    assert re.search(r"most recent call first.*worst_agents\.py", log, re.DOTALL), "it says where"
