"""`tidegate worker` and the worker in JavaScript, on a real gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tests.fakes import Stage, eventually, staged
from tests.gateway_process import running
from tests.integration.gateway.control_stage import TASK, Sums
from tests.remote_workers import WORKER_KEY
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.attempt_runner import AttemptRunner
from tidegate.agents.base import FunctionAgent, Session
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient
from tidegate.types import Outcome, TaskView

AGENT = """
import asyncio, pathlib, time

async def ask(task, session):
    reply = await session.openai().chat.completions.create(model=session.model, messages=task.messages)
    return "3" if reply.choices[0].message.content else None

async def wait(task, session):
    pathlib.Path(__file__).with_name("started").touch()
    await asyncio.sleep(60)
"""


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    (tmp_path / "agents.py").write_text(AGENT)
    (tmp_path / "worker.key").write_text(WORKER_KEY + "\n")
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": Sums()}, worker_key=WORKER_KEY) as made:
        yield made


async def offer(client: GatewayClient, heartbeat_s: float = 60.0) -> str:
    access = await client.open_session(task=TASK, deadline_s=30.0, offer_heartbeat_s=heartbeat_s)
    return access.session_id


class Command:
    """A worker process, and what it wrote to stderr."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._log = folder / "worker.log"
        with open(self._log, "wb") as log:
            environment = {**os.environ, "TIDEGATE_WORKER_KEY": WORKER_KEY}
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment, cwd=REPO)

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def __aenter__(self) -> Command:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)


def worker(url: str, folder: Path, agent: str, *more: str) -> Command:
    command = (sys.executable, "-m", "tidegate", "worker", "--gateway", url)
    key = ("--key-file", str(folder / "worker.key"))
    return Command(folder, *command, *key, "--agent", f"{folder / 'agents.py'}:{agent}", *more)


async def test_a_worker_process_runs_attempts_and_gives_them_back_at_its_end(
    stage: Stage, tmp_path: Path
) -> None:
    opened = [await offer(stage.client) for _ in range(5)]
    async with worker(stage.url, tmp_path, "ask", "--concurrency", "2"):
        for session_id in opened:
            summary = await stage.client.result(session_id)
            assert (summary.outcome, summary.reward) == (Outcome.COMPLETED, 1.0)
    session_id = await offer(stage.client)
    async with worker(stage.url, tmp_path, "wait") as waiting:
        await eventually((tmp_path / "started").exists, 30)
        waiting.process.send_signal(signal.SIGINT)
        summary = await stage.client.result(session_id)
        assert (summary.outcome, summary.error) == (Outcome.CANCELLED, "the episode was cancelled")
        assert await asyncio.to_thread(waiting.process.wait, 20) == 0
        assert "returning 1 attempts to the gateway" in waiting.log


async def test_a_worker_that_ends_before_its_poll_was_answered_gives_the_attempt_back(
    stage: Stage,
) -> None:
    taken, held = asyncio.Event(), asyncio.Event()

    class Slow(AttemptRunner):
        async def _send(self, url: str, key: str, body: dict[str, Any]) -> Any:
            answer = await super()._send(url, key, body)
            if url.endswith("/attempts/next"):
                taken.set()
                await held.wait()
            return answer

    session_id = await offer(stage.client)
    stop = asyncio.Event()
    agent = FunctionAgent(lambda task, session: "3")
    task = asyncio.create_task(Slow(stage.url, WORKER_KEY, agent, 1, lambda _: None).run(stop))
    async with asyncio.timeout(20):
        await taken.wait()
        stop.set()
        await task
        summary = await stage.client.result(session_id)
    assert summary.outcome is Outcome.CANCELLED
    assert str(summary.error).endswith(" ended")


async def test_a_worker_with_a_wrong_key_says_so_and_exits(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "worker.key").write_text("other")
    async with worker(stage.url, tmp_path, "ask") as refused:
        assert await asyncio.to_thread(refused.process.wait, 30) != 0
        assert "tidegate: this route needs the gateway's worker key" in refused.log


async def test_an_agent_that_blocks_its_event_loop_delays_no_heartbeat(stage: Stage) -> None:
    async def block(task: TaskView, session: Session) -> str:
        time.sleep(2.0)  # noqa: ASYNC251 - what the test is about
        await session.openai().chat.completions.create(model=session.model, messages=task.messages)
        return "3"

    session_id = await offer(stage.client, heartbeat_s=0.3)
    stop = asyncio.Event()
    running_worker = AttemptRunner(stage.url, WORKER_KEY, FunctionAgent(block), 4, lambda _: None)
    task = asyncio.create_task(running_worker.run(stop))
    summary = await stage.client.result(session_id)
    assert (summary.outcome, summary.reward) == (Outcome.COMPLETED, 1.0)
    stop.set()
    await task


async def test_a_worker_whose_attempt_was_ended_stops_its_episode_and_pulls_again(stage: Stage) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    loop, told = asyncio.get_running_loop(), list[str]()

    async def hang(task: TaskView, session: Session) -> str:
        if cancelled.is_set():
            return "3"
        loop.call_soon_threadsafe(started.set)
        try:
            await asyncio.sleep(60)
        finally:
            loop.call_soon_threadsafe(cancelled.set)
        return ""

    first = await offer(stage.client, heartbeat_s=0.3)
    stop = asyncio.Event()
    task = asyncio.create_task(
        AttemptRunner(stage.url, WORKER_KEY, FunctionAgent(hang), 1, told.append).run(stop)
    )
    async with asyncio.timeout(10):
        await started.wait()
        await stage.client.delete_session(first)
        await cancelled.wait()
        second = await offer(stage.client)
        assert (await stage.client.result(second)).outcome is Outcome.AGENT_ERROR, "it made no call"
    assert told == ["the gateway ended an attempt: the attempt was ended and deleted"]
    stop.set()
    await task


async def test_a_worker_goes_on_after_the_gateway_was_killed(tmp_path: Path) -> None:
    told: list[str] = []

    async def answer(task: TaskView, session: Session) -> str:
        return "3"

    model = make_model_dir(tmp_path / "tiny")
    async with running(model, tmp_path, worker_key=WORKER_KEY) as gateway:
        await gateway.until_up()
        stop = asyncio.Event()
        task = asyncio.create_task(
            AttemptRunner(gateway.url, WORKER_KEY, FunctionAgent(answer), 4, told.append).run(stop)
        )
        await gateway.client.result(await offer(gateway.client))
        gateway.kill()
        await gateway.until_died(1)
        await gateway.client.result(await offer(gateway.client))
        stop.set()
        await task
    assert told[0].startswith(f"no connection to {gateway.url}")
    assert told[1] == f"connected to {gateway.url} again"


async def test_a_refused_worker_raises(stage: Stage) -> None:
    async def answer(task: TaskView, session: Session) -> str:
        return "3"

    with pytest.raises(GatewayError, match="needs the gateway's worker key"):
        await AttemptRunner(stage.url, "wrong", FunctionAgent(answer), 1, lambda _: None).run(asyncio.Event())


@pytest.mark.skipif(shutil.which("node") is None, reason="the worker in JavaScript needs node")
async def test_the_worker_in_javascript(stage: Stage, tmp_path: Path) -> None:
    opened = [await offer(stage.client, heartbeat_s=0.3) for _ in range(3)]
    async with Command(tmp_path, "node", str(REPO / "examples" / "remote" / "worker.mjs"), stage.url, "2"):
        for session_id in opened:
            assert (await stage.client.result(session_id)).outcome is Outcome.COMPLETED
            trajectory = await stage.client.trajectory(session_id)
            assert trajectory.output
            assert len(trajectory.turns) == 1
