"""The example's training loop, killed at each of its points; agents are the clients of a notebook."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests import REPO
from tests.e2e.runs import ENVIRONMENT, server
from tests.waiting import eventually
from tidegate.client import Client
from tidegate.errors import GroupRefusedError
from tidegate.failpoints import PASSED, VARIABLE
from tidegate.gateway.project_keys import create_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
SCRIPT = REPO / "examples" / "own_trainer" / "train.py"
MODEL = REPO / "examples" / "tiny_base" / "model"
STEPS, GROUPS = 6, 4
POINTS = {"own.commit.before": 1, "own.ended": 2, "own.acknowledged": 2, "own.commit.after": 3}
"""Failpoint → after how many passes of a process it kills: twice in step 1, the second time between two
acknowledgements, in step 3, and in the last step."""


async def test_a_loop_that_is_killed_around_its_commits_trains_on_each_group_once(tmp_path: Path) -> None:
    keys, passed, run = tmp_path / "keys.json", tmp_path / "passed", tmp_path / "run"
    key = create_key(keys, "notebook")
    passed.mkdir()
    killing = {VARIABLE: ",".join(f"{name}:{count}" for name, count in POINTS.items()), PASSED: str(passed)}
    with (
        server("engine", tmp_path, f"--model.path={MODEL}", "--engine.max_slots=32", "--port=0") as engine,
        server(
            "gateway", tmp_path, f"--model.path={MODEL}", f"--gateway.keys={keys}", "--gateway.port=0",
            "--clients.max_tokens=24", "--clients.max_groups=12", f"--journal={tmp_path / 'journal'}",
        ) as gateway,
    ):  # fmt: skip
        command = [sys.executable, str(SCRIPT), gateway, engine, str(MODEL), str(run), str(STEPS)]
        ends: Counter[str] = Counter()
        async with Client(gateway, key) as client, asyncio.TaskGroup() as tasks:
            agents = [tasks.create_task(agent(client, ends)) for _ in range(8)]
            for expected in (-9, -9, -9, -9, 0):
                process = await asyncio.create_subprocess_exec(
                    *command, cwd=REPO, env=ENVIRONMENT | killing, stdout=PIPE, stderr=STDOUT
                )
                said, _ = await asyncio.wait_for(process.communicate(), 120)
                assert process.returncode == expected, said.decode()
            await eventually(lambda: ends[f"step {STEPS}"] >= GROUPS, 60)
            for one in agents:
                one.cancel()
    assert sorted(os.listdir(passed)) == sorted(POINTS)
    newest = json.loads((run / f"step_{STEPS:06d}" / "step.json").read_text())
    assert (newest["step"], len(set(newest["groups"]))) == (STEPS, GROUPS)
    trained = {end: number for end, number in ends.items() if end.startswith("step ")}
    assert trained == {f"step {step}": GROUPS for step in range(1, STEPS + 1)}, ends
    assert set(ends) <= {*trained, "stale"}, ends


async def agent(client: Client, ends: Counter[str]) -> None:
    """Forms groups whose rewards differ, and notes how each of them ends."""
    for number in itertools.count():
        async with client.group(f"task-{number}") as group:
            for reward in (0.0, 1.0):
                async with group.episode() as episode:
                    await episode.openai().chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": f"Question {number}?"}]
                    )
                    episode.reward = reward
        try:
            ends[f"step {(await group).step}"] += 1
        except GroupRefusedError as refused:
            ends[refused.state] += 1
