"""A gateway with the real embedded engine, and clients that run as processes."""

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
"""A problem that the bundled model solves with one calculator call."""


@contextlib.contextmanager
def process(announce: Path, *arguments: str) -> Iterator[str]:
    """Runs a `tidegate` server inside the block; yields its URL."""
    words = [
        sys.executable,
        "-m",
        "tidegate",
        *arguments,
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
def gateway_server(folder: Path) -> Iterator[str]:
    """Runs a gateway with the embedded engine and the bundled model; yields its URL."""
    model = str(BASE_MODEL)
    with (
        process(folder / "engine.json", "engine", "--model.path", model, "--port=0") as engine,
        process(
            folder / "gateway.json",
            "gateway",
            "--model.path",
            model,
            "--engine.urls",
            engine,
            "--env.use=arithmetic",
            "--gateway.port=0",
        ) as gateway,
    ):
        yield gateway


@dataclass
class WideEngine(FakeEngine):
    """A scripted engine with a context long enough for command-line agents."""

    max_context: int = 400_000


@contextlib.asynccontextmanager
async def scripted(
    folder: Path, replies: Sequence[str], engine_type: type[FakeEngine] = WideEngine, **options: Any
) -> AsyncIterator[Stage]:
    """Runs a gateway with an engine whose replies are scripted in the model's tool-call format; `options` are
    the gateway's."""
    model = make_model_dir(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 400_000}))
    async with staged(model, engine_type=engine_type, **options) as stage:
        for reply in replies:
            stage.say(reply)
        yield stage


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def python(environment: str) -> str:
    """The interpreter of an environment made by `make test-clients`."""
    found = ENVIRONMENTS / environment / "bin" / "python"
    assert found.exists(), f"there is no {found}: run `make test-clients`, which makes it"
    return str(found)


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of a client: its output and its recorded trajectory."""

    output: str
    trajectory: Trajectory

    @property
    def saw(self) -> Any:
        """The JSON object that the test programs print last."""
        return json.loads(self.output.strip().splitlines()[-1])

    def assert_one_line(self, turns: int) -> None:
        """Checks for `turns` turns, each delivered, complete, and a continuation of the previous one."""
        self.assert_parents([None, *range(turns - 1)])

    def assert_parents(self, parents: Sequence[int | None]) -> None:
        """Checks the parent of each turn. All turns are delivered and complete; prompts repeat recorded ids.

        A turn that does not continue the newest turn must have a reason.
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
    """Runs a command as the agent of one session, as a training run does."""
    access = await client.open_session(
        task=task, env=task.env, split=split, seed=3, deadline_s=DEADLINE_S, sampling=sampling
    )
    session = Session(access.base_url, access.api_key, "policy", 0, time.monotonic() + DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        result = await CommandAgent(command, env).run(task.view(), session)
    await client.finish(access.session_id, output=result.output)
    return Episode(result.output or "", await client.trajectory(access.session_id))


async def run_both_ways(
    client: GatewayClient, command: Sequence[str], *, task: Task, sampling: Sampling
) -> list[Episode]:
    """Runs a command in two sessions at the same time: with whole replies, and with streamed ones."""
    runs = [run_client(client, [*command, way], task=task, sampling=sampling) for way in ("whole", "stream")]
    return await asyncio.gather(*runs)
