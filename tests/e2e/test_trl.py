"""TRL's own GRPOTrainer learns from agents on a gateway; its batches are the journal's turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from subprocess import STDOUT
from typing import Any

import pytest
import torch

from tests import REPO
from tests.e2e.runs import ENVIRONMENT, server
from tidegate.agents.calculator import calculate
from tidegate.agents.solver import TOOLS
from tidegate.client import Client
from tidegate.envs.arithmetic import Arithmetic, exact_answer
from tidegate.gateway.journal.sqlite import DiskJournal
from tidegate.gateway.project_keys import create_key
from tidegate.trainer.batch.rows import TrainingSequence, rows_of
from tidegate.types import Outcome, Trajectory

PYTHON = os.environ.get("TIDEGATE_TRL_PYTHON", sys.executable)
"""Interpreter of an environment with Tidegate and requirements/trl.txt."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1400),
    pytest.mark.skipif(
        sys.executable == PYTHON and find_spec("trl") is None,
        reason="TRL is not installed (TIDEGATE_TRL_PYTHON)",
    ),
]
MODEL = REPO / "examples" / "tiny_base" / "model"
STEPS, GROUPS, EPISODES = 45, 4, 8
RESUMED = 5
"""Step after which a second process continues."""
DRIVER = """
import runpy, sys
from pathlib import Path
import torch
from tests.journal_copy import copy_journal
from tidegate.trainer.trl import GatewayGRPOTrainer

noted, journal, script = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
make = GatewayGRPOTrainer._generate_and_score_completions

def note(trainer, inputs):
    batch = make(trainer, inputs)
    place = noted / f"{trainer.state.global_step:03d}"
    copy_journal(journal, place)
    names = ("session_id", "group_id", "reward", "versions")
    torch.save((batch, [{name: row[name] for name in names} for row in inputs]), place / "batch.pt")
    return batch

GatewayGRPOTrainer._generate_and_score_completions = note
sys.argv = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
"""


async def test_trl_learns_from_two_turn_agents_and_its_batches_are_the_journals(tmp_path: Path) -> None:
    keys, run, noted, journal = (tmp_path / name for name in ("keys.json", "run", "noted", "journal"))
    key, rewards = create_key(keys, "agents"), list[float]()
    noted.mkdir()
    with (
        server("engine", tmp_path, f"--model.path={MODEL}", "--engine.max_slots=32", "--port=0") as engine,
        server(
            "gateway", tmp_path, f"--model.path={MODEL}", f"--gateway.keys={keys}", "--gateway.port=0",
            "--clients.max_tokens=48", "--clients.max_groups=16", f"--journal={journal}",
        ) as gateway,
    ):  # fmt: skip
        async with Client(gateway, key) as client, asyncio.TaskGroup() as tasks:
            numbers = itertools.count()
            agents = [tasks.create_task(agent(client, numbers, rewards)) for _ in range(16)]
            codes = [
                await trl(tmp_path, str(noted), str(journal), gateway, engine, str(run), str(steps))
                for steps in (RESUMED, STEPS)
            ]
            for one in agents:
                one.cancel()
    assert codes == [0, 0], (tmp_path / "trl.log").read_text()[-4000:]
    turns = [await turns_of_batch(place) for place in sorted(noted.iterdir())]
    assert [len(one) for one in turns] == [GROUPS * EPISODES] * STEPS
    assert fmean(count >= 2 for one in turns for count in one) > 0.8, "agents call the calculator"
    newest = json.loads((run / f"step_{STEPS:06d}" / "step.json").read_text())
    assert (newest["step"], newest["version"]) == (STEPS, STEPS)
    before, after = fmean(rewards[:160]), fmean(rewards[-160:])
    print(f"reward of the first and last 160 episodes: {before:.3f}, {after:.3f}")
    assert after - before >= 0.3, (before, after)


async def trl(folder: Path, noted: str, journal: str, gateway: str, engine: str, run: str, steps: str) -> int:
    """Runs the example's trainer; returns its code."""
    script = str(REPO / "examples" / "trl" / "train.py")
    with (folder / "trl.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            PYTHON, "-c", DRIVER, noted, journal, script, gateway, engine, str(MODEL), run, steps,
            cwd=REPO, env=ENVIRONMENT | {"PYTHONPATH": str(REPO)}, stdout=log, stderr=STDOUT,
        )  # fmt: skip
        return await process.wait()


async def turns_of_batch(place: Path) -> list[int]:
    """Compares each row of a batch of TRL with a copy of the journal; returns the number of its turns."""
    batch, rows = torch.load(place / "batch.pt", weights_only=False)
    stored = DiskJournal(place)
    sessions = {session.id: session for session in stored.load().sessions}
    await stored.close()
    counts = []
    for index, row in enumerate(rows):
        session = sessions[row["session_id"]]
        turns = session.tree.turns()
        counts.append(len(turns))
        [expected] = rows_of(Trajectory(session.id, "", "", "train", Outcome.COMPLETED, turns), 0.0)
        assert trained(batch, row, index) == told(expected)
    return counts


def trained(batch: dict[str, Any], row: dict[str, Any], index: int) -> list[Any]:
    """Prompt, completion, mask, logprobs and versions of a row of TRL's batch."""
    kept, ids = batch["prompt_mask"][index].bool(), batch["completion_mask"][index].bool()
    assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
    return [
        batch["prompt_ids"][index][kept].tolist(),
        *(
            batch[name][index][ids].tolist()
            for name in ("completion_ids", "tool_mask", "old_per_token_logps")
        ),
        row["versions"],
    ]


def told(row: TrainingSequence) -> list[Any]:
    start = int(row.mask.argmax())
    arrays = (row.ids, row.mask.astype(int), row.logprobs, row.versions)
    return [row.ids[:start].tolist(), *(array[start:].tolist() for array in arrays)]


async def agent(client: Client, numbers: itertools.count[int], rewards: list[float]) -> None:
    """Works on tasks one after another, in groups of episodes with a calculator."""
    for number in numbers:
        task = Arithmetic().train_task(number)
        async with client.group(task.id) as group:
            found = await asyncio.gather(*(episode(group, task) for _ in range(EPISODES)))
        rewards += found


async def episode(group: Any, task: Any) -> float:
    async with group.episode() as one:
        messages, create = list(task.messages), one.openai().chat.completions.create
        while messages[-1]["role"] != "assistant" and len(messages) < 12:
            message = (await create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
            messages += [message.model_dump(exclude_none=True), *map(called, message.tool_calls or [])]
        one.reward = exact_answer(message.content, task.answer)
    return float(one.reward)


def called(call: Any) -> dict[str, str]:
    try:
        result = calculate(json.loads(call.function.arguments)["expression"])
    except (ValueError, KeyError, TypeError) as error:
        result = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": str(result)}
