"""A short run with a stateful environment, of which a worker process is killed while it has many states."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.runs import held, ledger, metrics, training

pytestmark = pytest.mark.slow

HELD = '''
import asyncio
import os
import uuid
from pathlib import Path

from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward


async def length(output, state):
    assert state["replies"], "the state is that of the whole conversation"
    return float(len(output or "") % 2)


class Held(Arithmetic):
    """In training its counterpart waits for the file `go`; each state is a file with its process's id."""

    rewards = (Reward("length", length),)

    def __init__(self, folder: str) -> None:
        super().__init__(held_out=8)
        self.folder = Path(folder)

    async def setup(self, task):
        file = self.folder / f"{task.id}-{uuid.uuid4().hex}.state"
        file.write_text(str(os.getpid()))
        return {"file": file, "replies": 0}

    async def respond(self, state, reply):
        state["replies"] += 1
        while state["file"].name.startswith("train") and not (self.folder / "go").exists():
            await asyncio.sleep(0.05)
        return await super().respond(state, reply)

    async def teardown(self, state):
        state["file"].unlink()
'''


def test_a_killed_environment_worker_costs_its_attempts_and_no_task(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    run_dir, steps, states = tmp_path / "run", 3, 32
    with training(
        run_dir, f"--trainer.steps={steps}", "--eval.every=0", "--agent.use=chat", "--agent.deadline_s=300",
        "--agent.options={max_turns = 1}", f"--env.use={tmp_path}/held.py:Held", "--env.workers=2",
        f'--env.options={{folder = "{tmp_path}"}}', "--env.call_timeout_s=240",
        "--trainer.dynamic_sampling=false", f"--agent.max_concurrency={states}",
    ) as run:  # fmt: skip
        run.until(lambda: len(list(tmp_path.glob("train-*.state"))) == states)
        processes = Counter(int(file.read_text()) for file in tmp_path.glob("train-*.state"))
        victim, lost = processes.most_common(1)[0]
        assert 0 < lost < states, "both workers have states"
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.output()[-3000:]
    assert metrics(run_dir)[-1]["step"] == steps
    audit = held(run_dir)
    assert audit.groups["trained"] == steps * 4, "the lost attempts were made again"
    assert audit.groups["failed"] == 0
    entries = ledger(run_dir)
    assert not [one for one in entries if one["event"] == "quarantined"]
    failures = Counter(one.get("outcome") for one in entries if one.get("state") == "failed")
    assert failures == {"infra_error": lost}, "each attempt of the killed worker, and no other"
