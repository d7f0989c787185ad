"""A gateway with a rewarder, and helpers that run one episode on it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.fakes import Stage, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.types import Message, Scored, Task, Trajectory

SECRET = "the answer is 4711"
TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer=SECRET, info={"why": SECRET})
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


class Sums:
    """A rewarder that sees what a rewarder sees."""

    names = ("exact",)

    def __init__(self) -> None:
        self.seen: list[tuple[Task, Trajectory, str | None, list[Message]]] = []
        self.hang: threading.Event | None = None

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored:
        self.seen.append((task, trajectory, output, messages))
        if self.hang is not None:
            self.hang.wait(30)
        exact = float(output == "3")
        return Scored(exact, {"exact": exact})


@pytest.fixture
def rewarder() -> Sums:
    return Sums()


@pytest.fixture
async def stage(tmp_path: Path, rewarder: Sums) -> AsyncIterator[Stage]:
    model = make_model_dir(tmp_path / "tiny")
    async with staged(model, rewarders={"sums": rewarder}, reward_timeout_s=0.5) as made:
        yield made


async def episode(stage: Stage, output: str = "3", **options: Any) -> str:
    """A session with one turn, finished; its id."""
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    await ask(access)
    await stage.client.finish(access.session_id, output=output)
    return access.session_id


async def ask(access: SessionAccess) -> str:
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:
        reply = await llm.chat.completions.create(model="m", messages=ASK)
        return reply.choices[0].message.content or ""
