"""Two policies in one session: real engines with different weights, the real SDK, a killed gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes import eventually
from tests.integration.gateway.test_engine import recomputed
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.client import GatewayClient
from tidegate.types import Sampling, Task

TEMPLATES = {"solver": "qwen2", "verifier": "mistral"}
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]


@contextlib.asynccontextmanager
async def started(announce: Path, *words: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Yields the URL and the process of a command, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", *words, "--announce", str(announce), "--owned",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    try:
        await eventually(lambda: announce.exists() or process.returncode is not None, 120)
        yield json.loads(await asyncio.to_thread(announce.read_text))["url"], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def say(llm: AsyncOpenAI, model: str, messages: Sequence[Any]) -> dict[str, Any]:
    reply = await llm.chat.completions.create(model=model, messages=list(messages))
    assert reply.model == model
    return reply.choices[0].message.model_dump(exclude_none=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_policy_samples_its_turns_before_and_after_a_kill_of_the_gateway(tmp_path: Path) -> None:
    for seed, (name, template) in enumerate(TEMPLATES.items()):
        tokenizer = make_tokenizer(template)
        make_tiny_model(tmp_path / name, vocab=len(tokenizer), seed=seed)
        tokenizer.save_pretrained(str(tmp_path / name))
    command = ["gateway", "--model.path", str(tmp_path / "solver"), "--journal", str(tmp_path / "journal")]
    command += [f"--policies.{name}.path={tmp_path / name}" for name in TEMPLATES]
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            started(tmp_path / f"{name}.json", "engine", "--model.path", str(tmp_path / name), "--port", "0")
            for name in TEMPLATES
        ]
        urls = [url for url, _ in await asyncio.gather(*map(stack.enter_async_context, engines))]
        first = contextlib.AsyncExitStack()
        url, process = await first.enter_async_context(
            started(tmp_path / "gateway.json", *command, "--gateway.port=0")
        )
        client = await stack.enter_async_context(GatewayClient(url))
        for name, engine in zip(TEMPLATES, urls, strict=True):
            assert (await client.add_engine(engine, policy=name))["policy"] == name
        access = await client.open_session(task=Task("t", "none", ASK), sampling=Sampling(max_tokens=24))
        llm = await stack.enter_async_context(
            AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=8)
        )
        said = await say(llm, "solver", ASK)
        judged = await say(llm, "verifier", [*ASK, said, *ASK])
        process.kill()
        await first.aclose()
        again = started(tmp_path / "again.json", *command, f"--gateway.port={url.rpartition(':')[2]}")
        await stack.enter_async_context(again)
        await say(llm, "solver", [*ASK, said, {"role": "user", "content": "Sure?"}])
        await say(llm, "verifier", [*ASK, said, *ASK, judged, *ASK])
        with pytest.raises(openai.NotFoundError, match="the models are solver, verifier"):
            await say(llm, "critic", ASK)
        rows = {row["url"]: row["policy"] for row in await client.list_engines()}
        assert rows == dict(zip(urls, TEMPLATES, strict=True))
        summary = await client.finish(access.session_id, reward={"solver": 1.0, "verifier": 0.0})
        assert (summary.reward, summary.policy_rewards) == (0.5, {"solver": 1.0, "verifier": 0.0})
        trajectory = await client.trajectory(access.session_id)
    names = ["solver", "verifier", "solver", "verifier"]
    assert [(turn.policy, turn.parent) for turn in trajectory.turns] == list(
        zip(names, (None, None, 0, 1), strict=True)
    )
    for turn in trajectory.turns:
        others = {
            name: np.abs(recomputed(tmp_path / name, trajectory, turn.index) - turn.logprobs).max()
            for name in TEMPLATES
        }
        assert others.pop(turn.policy) < 1e-4
        assert min(others.values()) > 1e-2, "the other policy's weights do not give them"
