"""Versions that are worse are rolled back while users talk and processes are killed with `kill -9`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import REPO
from tests.e2e.runs import ENVIRONMENT, held, metrics, training
from tests.waiting import eventually
from tidegate import failpoints
from tidegate.gateway.project_keys import create_key
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.service import service

sys.path.insert(0, str(REPO / "examples" / "online"))

from users import Users

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = REPO / "examples" / "online" / "config.toml"
CANARY = [
    "--run.live_view=false", "--engine.count=2", "--trainer.groups_per_batch=16", "--trainer.steps=20",
    "--trainer.promotion.mode=canary", "--trainer.promotion.share=0.5", "--trainer.promotion.margin=0.2",
    "--trainer.learning_rate=0.02", "--trainer.schedule=constant",
    "--trainer.keep_checkpoints=4",
]  # fmt: skip
"""With this learning rate every version is worse than the base."""


class HastyUsers(Users):
    """Users who give their thumb at once."""

    async def thumb(self, reply: str, right: float, delay_s: float) -> None:
        await super().thumb(reply, right, 0.0)


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """The ledger's entries of an event, while the ledger is written."""
    file = run_dir / "ledger.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["event"] == event]


def begun(run_dir: Path) -> int:
    """Number of versions whose test began."""
    return sum(bool(line.get("candidate")) for line in events(run_dir, "publishing"))


def versions(action: str, run_dir: Path, *arguments: str) -> str:
    """Runs the command; a test that ended meanwhile leaves it nothing to decide."""
    command = [sys.executable, "-m", "tidegate", "versions", action, str(run_dir), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=ENVIRONMENT).stdout


@asynccontextmanager
async def talking(url: str, key: str) -> AsyncIterator[HastyUsers]:
    users = HastyUsers(url, key)
    task = asyncio.create_task(users.run())
    try:
        yield users
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await users.llm.close()


async def test_users_keep_the_live_version_while_worse_ones_are_tested_and_rolled_back(
    tmp_path: Path,
) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys.json"
    key = create_key(keys, "shop")
    place = ["--gateway.port=0", f"--gateway.keys={keys}"]
    with training(run_dir, *place, config=CONFIG, small=CANARY, command="serve") as run:
        await asyncio.to_thread(run.until_said, "agents ready in")
        url = json.loads((run_dir / "logs" / "gateway.address").read_text())["url"]
        async with talking(url, key) as users:
            await eventually(lambda: len(events(run_dir, "rolled_back")) == 1, 90)
            for number, name in enumerate(("gateway", "engine-2", "trainer"), start=2):
                await eventually(lambda n=number: begun(run_dir) >= n, 60)
                os.kill(run.owned(name), signal.SIGKILL)
            await eventually(lambda: len(events(run_dir, "rolled_back")) >= 3, 120)
            assert not events(run_dir, "promoted")
            assert await users.evaluate(60) > 0.15, "users are served by the live version"
            await eventually(lambda: promoted_by_hand(run_dir), 90)
            before = events(run_dir, "promoted")[0]["step"] - 1
            assert "requested" in versions("rollback", run_dir, f"--step={before}")
            await eventually(lambda: "whose policy is live as version" in run.output(), 60)
            assert await users.evaluate(60) > 0.15, "the promoted version was rolled back"
        run.process.terminate()
        assert await asyncio.to_thread(run.wait) == 0, run.output()
    audit = held(run_dir)
    assert audit.groups["trained"] % 16 == 0
    tested = [line["version"] for line in events(run_dir, "publishing") if line.get("candidate")]
    assert json.loads((run_dir / "canary.json").read_text())["version"] in tested
    shown = service(FollowedRun(run_dir))
    listed = [json.loads(line) for line in versions("list", run_dir, "--json").splitlines()]
    rows = [(row["version"], row["state"], row["why"]) for row in shown["versions"]]
    assert rows == [(row["version"], row["state"], row["why"]) for row in reversed(listed)]


def promoted_by_hand(run_dir: Path) -> bool:
    """Requests that the version in test goes live; returns whether one did."""
    if not events(run_dir, "promoted") and "in test" in versions("list", run_dir):
        versions("promote", run_dir)
    return bool(events(run_dir, "promoted"))


def test_a_candidate_that_scores_worse_on_held_out_tasks_is_rolled_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [
        "--engine.count=2", "--trainer.promotion.mode=evaluated", "--trainer.learning_rate=0.02",
        "--trainer.steps=3", "--eval.interim_tasks=24", "--trainer.keep_checkpoints=4",
    ]  # fmt: skip
    with training(run_dir, *settings) as run:
        assert run.wait() == 0, run.output()
    assert len(events(run_dir, "rolled_back")) == 3
    assert not events(run_dir, "promoted")
    for line in events(run_dir, "rolled_back"):
        assert line["reward"] < line["live_reward"] - 0.1
        assert line["episodes"] >= 12
    held(run_dir)
    lines = {line["step"]: line for line in metrics(run_dir)}
    assert lines[3]["eval/reward"] > lines[0]["eval/reward"] - 0.2, "the policy of the base is live again"
    assert lines[3]["eval/version_max"] == 0
    replay = [sys.executable, "-m", "tidegate", "replay", str(run_dir)]
    subprocess.run(replay, check=True, capture_output=True, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("event", "rate", "places"),
    [
        ("promoted", 1e-5, ["ledger.run.promoted.after", "publish.promoted.after"]),
        ("rolled_back", 0.02, ["ledger.run.rolled_back.before", "ledger.run.rolled_back.after"]),
    ],
)
def test_a_run_that_is_killed_at_the_writes_of_a_test_goes_on(
    tmp_path: Path, event: str, rate: float, places: list[str]
) -> None:
    run_dir, passed = tmp_path / "run", tmp_path / "passed"
    passed.mkdir()
    armed = {
        **ENVIRONMENT, failpoints.PASSED: str(passed),
        failpoints.VARIABLE: ",".join(f"{place}:1" for place in places),
    }  # fmt: skip
    settings = [
        "--engine.count=2", "--trainer.promotion.mode=evaluated", f"--trainer.learning_rate={rate}",
        "--trainer.promotion.margin=0.3", "--trainer.steps=2", "--eval.interim_tasks=16", "--eval.every=0",
        "--eval.tasks=8", "--trainer.groups_per_batch=2",
    ]  # fmt: skip
    for _ in range(len(places) + 1):
        more = ["--resume"] if (run_dir / "ledger.jsonl").exists() else []
        with training(run_dir, *settings, *more, environment=armed) as run:
            if run.wait() == 0:
                break
    assert run.process.returncode == 0, run.output()
    assert {path.name for path in passed.iterdir()} == set(places)
    held(run_dir)
    assert len({line["version"] for line in events(run_dir, event)}) == len(events(run_dir, event)) >= 3
    if event == "rolled_back":
        assert not events(run_dir, "promoted")
