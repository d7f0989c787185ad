"""Shared parts of the tests of the gateway with a real SDK: fixtures, a session's client, its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.fakes import Stage, staged
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.types import Task, Trajectory

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}], answer="4711")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'


@pytest.fixture(params=["qwen3"])
async def stage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """With the chat template that the test's parameter names."""
    async with staged(make_model_dir(tmp_path / "tiny", request.param)) as made:
        yield made


async def opened(stage: Stage, **options: Any) -> tuple[SessionAccess, AsyncOpenAI]:
    access = await stage.client.open_session(**{"task": TASK, "deadline_s": 20.0, **options})
    return access, await stage.llm(access, max_retries=0)


async def finished(stage: Stage, access: SessionAccess) -> Trajectory:
    await stage.client.finish(access.session_id, reward=1)
    return await stage.client.trajectory(access.session_id)
