"""A gateway before the real embedded engine, and clients that run as processes before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import REPO
from tests.fakes import FakeEngine, Stage, staged
from tests.tiny_tokenizer import make_model_dir
from tests.waiting import announced
from tidegate.agents.base import Session
from tidegate.agents.command import CommandAgent
from tidegate.gateway.client import GatewayClient
from tidegate.types import Sampling, Split, Task, Trajectory

BASE_MODEL = REPO / "examples" / "tiny_base" / "model"
ENVIRONMENTS = REPO / ".venvs"
NODE = ENVIRONMENTS / "node" / "node_modules"
PROGRAMS = Path(__file__).parent / "programs"
START_S = 120.0
NEARLY_GREEDY = Sampling(0.1, max_tokens=64)
DEADLINE_S = 240.0
QUESTION = "Ben buys 10 stamps at $5 each and 6 pears at $15 each. How much does Ben spend?"
TASK = Task(
    "two_prices",
    "arithmetic",
    [{"role": "user", "content": QUESTION}],
    answer="10 * 5 + 6 * 15 = 140\n#### 140",
)
"""A problem that the bundled model solves with one call of its calculator."""


@contextlib.contextmanager
def process(announce: Path, *arguments: str) -> Iterator[str]:
    """A verb of `tidegate` that serves; its URL. It is gone afterwards."""
    words = [
        sys.executable,
        "-m",
        "tidegate",
        *arguments,
        "--port",
        "0",
        "--announce",
        str(announce),
        "--owned",
    ]
    running = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        yield announced(announce, running, START_S)
    finally:
        running.kill()
        running.wait()


@contextlib.contextmanager
def house(folder: Path) -> Iterator[str]:
    """The gateway's URL; behind it is the embedded engine with the bundled model."""
    model = str(BASE_MODEL)
    with (
        process(folder / "engine.json", "engine", "--model", model) as engine,
        process(
            folder / "gateway.json", "gateway", "--model", model, "--engine", engine, "--env", "arithmetic"
        ) as gateway,
    ):
        yield gateway


@dataclass
class WideEngine(FakeEngine):
    """Scripted, with room for the prompts of command-line agents."""

    max_context: int = 400_000


@contextlib.asynccontextmanager
async def scripted(
    folder: Path, replies: Sequence[str], engine_type: type[FakeEngine] = WideEngine
) -> AsyncIterator[Stage]:
    """A gateway before an engine whose replies are written here, in the model's own form of tool calls."""
    model = make_model_dir(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 400_000}))
    async with staged(model, engine_type=engine_type) as stage:
        for reply in replies:
            stage.say(reply)
        yield stage


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python(environment: str) -> str:
    """The interpreter of one of the environments that `make test-clients` makes."""
    found = ENVIRONMENTS / environment / "bin" / "python"
    assert found.exists(), f"there is no {found}: run `make test-clients`, which makes it"
    return str(found)


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a client: what it printed, and what the gateway recorded of it."""

    output: str
    trajectory: Trajectory

    @property
    def saw(self) -> Any:
        """The JSON that our own programs print last."""
        return json.loads(self.output.strip().splitlines()[-1])

    def assert_one_line(self, turns: int) -> None:
        """So many turns, each of them delivered, whole, and a continuation of the one before."""
        self.assert_parents([None, *range(turns - 1)])

    def assert_parents(self, parents: Sequence[int | None]) -> None:
        """The turns that each turn continues; all are delivered and whole, and prompts repeat recorded ids.

        A turn says why it does not continue the newest one.
        """
        found = self.trajectory.turns
        assert [turn.parent for turn in found] == parents, [turn.branch for turn in found]
        for index, turn in enumerate(found):
            assert (turn.branch is None) == (turn.parent == (index - 1 if index else None))
            assert turn.delivered
            assert len(turn.logprobs) == len(turn.output_ids) > 0
            assert turn.oldest_version() is not None
            if turn.parent is not None:
                before = found[turn.parent]
                recorded = [*self.trajectory.prompt_ids(before).tolist(), *before.output_ids.tolist()]
                assert self.trajectory.prompt_ids(turn).tolist()[: len(recorded)] == recorded


async def run_client(
    client: GatewayClient,
    command: Sequence[str],
    *,
    task: Task = TASK,
    env: Mapping[str, str] | None = None,
    split: Split = "train",
    sampling: Sampling = NEARLY_GREEDY,
) -> Episode:
    """Run a command as the agent of one session, as a training run does."""
    access = await client.open_session(
        task=task, env=task.env, split=split, seed=3, deadline_s=DEADLINE_S, sampling=sampling
    )
    session = Session(access.base_url, access.api_key, "policy", 0, time.monotonic() + DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        result = await CommandAgent(command, env).run(task.view(), session)
    await client.finish(access.session_id, output=result.output)
    return Episode(result.output or "", await client.trajectory(access.session_id))
