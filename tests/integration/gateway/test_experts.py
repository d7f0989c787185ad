"""Experts from the engine to the trainer: logprobs agree where the routers of the engine chose otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from tests.fakes import served
from tests.integration.engine.engine_http import Client, serving
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.config import TrainerSettings
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.policy.routing import weights_of
from tidegate.trainer.records.trajectories import decode_trajectory, encode_trajectory
from tidegate.types import Sampling, Task, Trajectory

TASK = Task("t", "none", [])
LENGTH = 60


def choose_otherwise(_: Any, __: Any, routed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A tenth of the tokens, by their logits, get the experts that the router ranks last."""
    logits, weights, own = routed
    flipped = (logits[:, :1] * 1000).floor() % 10 == 0
    ids = torch.where(flipped, logits.topk(own.shape[1], largest=False).indices, own)
    return logits, weights_of(logits, ids, normalised=False).to(weights.dtype), ids


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer("qwen2")
    path = tmp_path_factory.mktemp("policy")
    make_tiny_model(path, vocab=len(tokenizer), hidden=32, family="qwen3_moe")
    tokenizer.save_pretrained(str(path))
    return path


@pytest_asyncio.fixture
async def engine(weights: Path) -> AsyncIterator[Client]:
    options = EngineOptions(weights, max_slots=4, max_context=1024)
    model = load_model(options)
    for router in model.routers.values():
        router.register_forward_hook(choose_otherwise, prepend=True)
    async with serving(Engine(options, model, TokenDecoder.load(weights))) as client:
        yield client


def worst_error(policy: Policy, trajectory: Trajectory) -> float:
    rows = rows_of(trajectory, 1.0)
    found = policy.logprobs(rows)
    return max(float(abs(one - row.logprobs).max()) for one, row in zip(found, rows, strict=True))


async def conversation(
    engine: Client, weights: Path, directory: Path, sampling: Sampling, stream: bool
) -> Trajectory:
    """Three turns, and a branch; the second call is exempt, and so only context, the third is interrupted."""
    gateway = Gateway(GatewayOptions(model=weights, journal=directory))
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine.url)
        access = await client.open_session(task=TASK, seed=1, deadline_s=60, sampling=sampling)
        messages: list[Any] = [{"role": "user", "content": "Go on for ever."}]
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:

            async def say(exempt: bool = False) -> str:
                headers = {"x-tidegate-train": "no"} if exempt else {}
                ask: Any = {"model": "m", "messages": messages, "extra_headers": headers}
                if not stream:
                    return (await llm.chat.completions.create(**ask)).choices[0].message.content or ""
                chunks = await llm.chat.completions.create(**ask, stream=True)
                return "".join([one.choices[0].delta.content or "" async for one in chunks if one.choices])

            async def interrupt(sampled: int) -> None:
                await engine.until(lambda info: info["tokens_sampled"] > sampled + 5)
                await engine.post("/pause_generation", {"mode": "abort"})
                await engine.post("/continue_generation")

            for turn in range(3):
                sampled = (await engine.info())["tokens_sampled"]
                interrupted = asyncio.create_task(interrupt(sampled)) if turn == 2 else None
                said = await say(exempt=turn == 1)
                if interrupted is not None:
                    await interrupted
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"More, {turn}."},
                ]
            messages[2] = {"role": "user", "content": "Another branch."}
            del messages[3:]
            await say()
        await client.finish(access.session_id, reward=1.0)
        return await client.trajectory(access.session_id)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_logprobs_agree_where_the_engines_routers_chose_otherwise(
    engine: Client, weights: Path, tmp_path: Path, stream: bool
) -> None:
    sampling = Sampling(0.8, max_tokens=LENGTH, routed_experts=True)
    trajectory = await conversation(engine, weights, tmp_path, sampling, stream)
    assert len(trajectory.turns) == 4
    assert sum(turn.trainable for turn in trajectory.turns) == 3
    assert all(turn.experts is not None for turn in trajectory.turns)
    again = decode_trajectory(encode_trajectory(trajectory))
    with_replay = worst_error(Policy.load(weights, TrainerSettings(routing_replay=True)), again)
    without = worst_error(Policy.load(weights, TrainerSettings()), again)
    print(f"max_logprob_error_with_replay {with_replay:.2g}, without {without:.2g}")
    assert with_replay <= 1e-4
    assert without >= 10 * max(with_replay, 1e-4)


async def test_experts_are_recorded_on_request_alone(engine: Client, weights: Path, tmp_path: Path) -> None:
    trajectory = await conversation(engine, weights, tmp_path, Sampling(0.8, max_tokens=20), stream=False)
    assert all(turn.experts is None for turn in trajectory.turns)
