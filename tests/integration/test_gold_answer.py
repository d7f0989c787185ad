"""The gold answer of a task is in the run's trajectory files, and nowhere that an agent can read."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from tests.fakes import Stage, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.config import load_settings
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.observer import Silent
from tidegate.settings.run import AgentSettings
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.batch.batcher import Batcher
from tidegate.trainer.processes.agents import AgentProcess
from tidegate.trainer.processes.provider import GatewayAccess
from tidegate.trainer.records.trajectories import TrajectoryFiles, read_lines
from tidegate.trainer.records.writer import FileWriter
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.evaluator import Evaluator
from tidegate.trainer.rollout.pause import Pause
from tidegate.trainer.rollout.rollout import Rollout
from tidegate.types import Task

GOLD = "gold-4711"

AGENT = '''
import json, os, sys
from pathlib import Path

import httpx


async def spy(task, session):
    """Returns everything that it can read: its task, its session, its process, the gateway's replies."""
    files = [file for file in map(Path, ("/proc/self/environ", "/proc/self/cmdline")) if file.exists()]
    seen = [repr(task), repr(session), sys.argv, dict(os.environ)]
    seen += [repr(file.read_bytes()) for file in files]
    llm = session.openai()
    reply = await llm.chat.completions.with_raw_response.create(model=session.model, messages=task.messages)
    seen.append([reply.text, dict(reply.headers)])
    root, _, name = session.base_url.removesuffix("/v1").rpartition("/s/")
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.api_key}"}) as http:
        own = f"/sessions/{name}"
        for path in (f"/s/{name}/v1/models", own, f"{own}/trajectory", "/groups", "/metrics"):
            found = await http.get(root + path)
            seen.append([path, found.status_code, found.text, dict(found.headers)])
    return json.dumps(seen)
'''


class Sums(Environment):
    """Its reward is 1 where the gold answer reaches it."""

    name = "sums"
    rewards = (Reward("gold", lambda output, answer: float(GOLD in str(answer))),)

    def train_task(self, index: int) -> Task:
        return Task(f"train-{index}", "sums", [{"role": "user", "content": "1+2?"}], [GOLD, index])

    def eval_sets(self) -> dict[str, list[Task]]:
        return {"": [Task("eval-0", "sums", [{"role": "user", "content": "1+2?"}], f"{GOLD}-eval")]}


async def unsaved(*_: object) -> None: ...


async def trained_and_evaluated(stage: Stage, environment: Sums, agent: Path, run_dir: Path) -> None:
    """A batch of one group, and an evaluation, with the parts of a run that write them."""
    settings = load_settings(None, ["--model.path=x"])
    rules = Rules(groups_per_batch=1, group_size=2, min_group_size=2, max_staleness=0)
    admission = Admission(rules, lambda _: None)
    await stage.client.begin_epoch(admission.epoch)
    await stage.client.admit_engine(stage.engine.url, True)
    access = GatewayAccess(stage.url, stage.client.agents_key)
    agents = AgentProcess(AgentSettings(use=f"{agent}:spy"), access, run_dir, "agent")
    await agents.start()
    episodes = EpisodeSource(stage.client, 60.0, admission.epoch)
    files, writer = TrajectoryFiles(run_dir), FileWriter()
    rollout = Rollout(
        settings=settings, admission=admission, episodes=episodes, tasks=environment,
        save=partial(writer.run, files.append), dead_letter=unsaved,
        pause=Pause(admission=admission, note=lambda _: None, limit_s=60.0),
    )  # fmt: skip
    batches = Batcher(
        gateway=stage.client,
        admission=admission,
        on_freed=rollout.wake,
        should_train=lambda _: True,
        answer=rollout.answer,
    )
    running = asyncio.create_task(rollout.run())
    try:
        async with asyncio.timeout(60):
            batch = await batches.next_batch()
            batch.advantages = [[0.0, 0.0]]
            files.batch(batch, 1)
            await Evaluator(
                settings=settings, episodes=episodes, sets=dict(environment.eval_sets()), observer=Silent(),
                save=partial(writer.run, files.evaluation),
            ).full(0)  # fmt: skip
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await agents.stop()
        await writer.close()


async def test_the_gold_answer_is_in_the_files_and_reaches_no_agent(tmp_path: Path) -> None:
    agent = tmp_path / "spying_agent.py"
    agent.write_text(AGENT)
    environment = Sums()
    async with staged(make_model_dir(tmp_path / "tiny"), rewarders={"sums": environment}) as stage:
        await trained_and_evaluated(stage, environment, agent, tmp_path)
    lines = [*read_lines(tmp_path / "trajectories" / "step_000001.jsonl"),
             *read_lines(tmp_path / "trajectories" / "eval_000000.jsonl")]  # fmt: skip
    assert [line["answer"] for line in lines] == [[GOLD, 0]] * 2 + [f"{GOLD}-eval"] * 2
    for line in lines:
        assert line["reward"] == 1
        assert "1+2?" in line["output"], "the agent read its task"
        assert GOLD not in line["output"]
        assert GOLD not in str({name: value for name, value in line.items() if name != "answer"})
