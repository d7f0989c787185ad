"""Groups of a client train a run, while gateway and trainer are killed with `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests import REPO
from tests.e2e.runs import ENVIRONMENT, held, ledger, training
from tidegate.client import Client, ClientGroup
from tidegate.envs.arithmetic import Arithmetic, exact_answer
from tidegate.errors import GatewayError, GroupRefusedError
from tidegate.gateway.project_keys import create_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
CONFIG = REPO / "examples" / "notebook" / "config.toml"
SMALL = [
    "--run.live_view=false", "--trainer.groups_per_batch=2", "--trainer.group_size=4",
    "--trainer.checkpoint_every=2",
]  # fmt: skip
STEPS = 8


class Program:
    """A client's own loop: groups at random tasks; what it was told of each group."""

    def __init__(self, url: str, key: str) -> None:
        self.client = Client(url, key, timeout_s=120)
        self.told: dict[str, str] = {}
        self.tasks = map(Arithmetic().train_task, range(100_000))

    async def run(self) -> None:
        async with self.client:
            await asyncio.gather(*(self.work() for _ in range(6)))

    async def work(self) -> None:
        for task in self.tasks:
            group = self.client.group(task.id)
            try:
                async with group:
                    await asyncio.gather(*(self.attempt(group, task) for _ in range(4)))
                await group
                self.told[group.name] = "stepped"
            except GroupRefusedError as refusal:
                self.told[group.name] = refusal.state
            except GatewayError as error:
                self.told[group.name] = f"lost: {error}"

    async def attempt(self, group: ClientGroup, task: object) -> None:
        async with group.episode() as episode:
            reply = await episode.openai().chat.completions.create(
                model="policy",
                messages=task.messages,  # type: ignore[attr-defined]
            )
            text = reply.choices[0].message.content
            episode.reward = exact_answer(text, task.answer) + len(text or "") % 7 / 10  # type: ignore[attr-defined]


async def test_the_example_for_notebooks_trains_a_run(tmp_path: Path) -> None:
    script = CONFIG.with_name("train.py")
    assert sum(bool(line.strip()) for line in script.read_text().splitlines()) <= 35
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key = create_key(keys, "me")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = [f"--gateway.port={port}", f"--gateway.keys={keys}", "--trainer.steps=2"]
    small = ["--run.live_view=false", "--trainer.groups_per_batch=2"]
    with training(run_dir, *place, config=CONFIG, small=small) as run:
        arguments = [sys.executable, str(script), f"http://127.0.0.1:{port}", key]
        await asyncio.to_thread(run.until_said, "clients: ")
        program = await asyncio.create_subprocess_exec(*arguments, env=ENVIRONMENT, stdout=-1, stderr=-1)
        try:
            assert await asyncio.to_thread(run.wait) == 0, run.output()
            said, warned = await asyncio.wait_for(program.communicate(), 30)
            assert (b"completed after step 2" in said, warned) == (True, b"")
            assert program.returncode == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                program.kill()
            await program.wait()
    assert held(run_dir).groups["trained"] == 4


async def test_a_program_trains_a_run_whose_processes_are_killed(tmp_path: Path) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key = create_key(keys, "me")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = [f"--gateway.port={port}", f"--gateway.keys={keys}", f"--trainer.steps={STEPS}"]
    program = Program(f"http://127.0.0.1:{port}", key)
    running = asyncio.create_task(program.run())
    try:
        with training(run_dir, *place, config=CONFIG, small=SMALL) as run:
            await asyncio.to_thread(run.until_step, 2)
            os.kill(run.owned("gateway"), signal.SIGKILL)
            await asyncio.to_thread(run.until_step, 5)
            run.kill()
        assert not running.done(), running
        with training(run_dir, *place, "--resume", config=CONFIG, small=SMALL) as run:
            finished = asyncio.create_task(asyncio.to_thread(run.wait))
            await asyncio.wait((finished, running), return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running
            assert await finished == 0, run.output()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    audit = held(run_dir)
    assert audit.groups["trained"] == STEPS * 2
    ended = {
        line["id"]: line["state"] for line in ledger(run_dir) if line["kind"] == "group" and "state" in line
    }
    put_back = {line["id"] for line in ledger(run_dir) if line["event"] == "put_back"}
    assert all(name.startswith("me.") for name in ended)
    for name, state in program.told.items():
        if state == "stepped":
            again = {"stepped", "stale"} if f"me.{name}" in put_back else {"stepped"}
            assert ended[f"me.{name}"] in again, f"{name} was trained on, and is {ended.get(f'me.{name}')}"
        if state == "refused":
            assert f"me.{name}" not in ended, "a refused group is in the ledger"
    assert "stepped" in program.told.values()
