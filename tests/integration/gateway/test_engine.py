"""The gateway with the real embedded engine: weights change in the middle of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from tests.fakes import served
from tests.integration.engine.engine_http import serving
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.engine.engine import Engine
from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.engines.reply_lists import MASS_TOLERANCE
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.types import Sampling, Task, Trajectory

TASK = Task("t", "none", [])
LENGTH = 120


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with one tokenizer; they never end a reply, so that there is time to interrupt."""
    tokenizer = make_tokenizer("qwen2")
    paths = []
    for version in (0, 1):
        path = tmp_path_factory.mktemp("policy") / str(version)
        make_tiny_model(path, vocab=len(tokenizer), seed=version)
        tokenizer.save_pretrained(str(path))
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def parts(models: list[Path]) -> tuple[EngineOptions, Model, TokenDecoder]:
    options = EngineOptions(models[0])
    return options, load_model(options), TokenDecoder.load(models[0])


@pytest.fixture
async def engine(parts: tuple[EngineOptions, Model, TokenDecoder], models: list[Path]) -> AsyncIterator[str]:
    model = parts[1]
    model.copy_weights(model.read_weights(models[0]))
    model.cache.drop()
    async with serving(Engine(*parts)) as client:
        yield client.url


async def publish(url: str, model: Path, version: int, mode: str) -> None:
    """What a trainer does: pause, load, resume."""
    async with aiohttp.ClientSession(url) as http:
        for path, body in (
            ("/pause_generation", {"mode": mode}),
            (
                "/update_weights_from_disk",
                {"model_path": str(model), "weight_version": str(version), "flush_cache": mode == "retract"},
            ),
            ("/continue_generation", {}),
        ):
            async with http.post(path, json=body) as response:
                assert response.status == 200, (path, await response.text())


def recomputed(model: Path, trajectory: Trajectory, index: int) -> np.ndarray:
    """The plain model's logprobs of a turn's output; shape [output]."""
    turn = trajectory.turns[index]
    prompt = trajectory.prompt_ids(turn)
    ids = torch.from_numpy(np.concatenate((prompt, turn.output_ids)).astype(np.int64))[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model).float()(ids).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / turn.temperature, -1)
    chosen: np.ndarray = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return chosen


async def sampled_tokens(engine: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(engine + "/model_info") as response:
        total: int = (await response.json())["tokens_sampled"]
        return total


async def reply(
    llm: AsyncOpenAI, messages: list[Any], stream: bool, engine: str, meanwhile: Callable[[], Awaitable[None]]
) -> str:
    """A reply's text; `meanwhile` is done as soon as some of it was sampled."""
    if not stream:
        before = await sampled_tokens(engine)
        whole = asyncio.create_task(llm.chat.completions.create(model="m", messages=messages))
        while not whole.done() and await sampled_tokens(engine) < before + 5:
            pass
        await meanwhile()
        return (await whole).choices[0].message.content or ""
    text, done = "", False
    async for chunk in await llm.chat.completions.create(model="m", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
        if text and not done:
            done = True
            await meanwhile()
    return text


async def interrupted(
    gateway: Gateway, engine: str, models: list[Path], mode: str, seed: int, stream: bool
) -> tuple[Trajectory, str]:
    """An episode of two turns with a publish in the first one; its trajectory and that turn's text."""
    await publish(engine, models[0], 0, "retract")
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine)
        access = await client.open_session(
            task=TASK, seed=seed, deadline_s=60, sampling=Sampling(0.8, max_tokens=LENGTH)
        )
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:
            messages: list[Any] = [{"role": "user", "content": "Go on for ever."}]
            text = await reply(llm, messages, stream, engine, lambda: publish(engine, models[1], 1, mode))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
            await llm.chat.completions.create(model="m", messages=messages, max_tokens=4)
        await client.finish(access.session_id, reward=1.0)
        return await client.trajectory(access.session_id), text


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_turn_that_straddles_a_publish_is_exact(
    engine: str, models: list[Path], mode: str, stream: bool
) -> None:
    """The agent sees one slow answer; every token's logprob is that of the version its span names."""
    for seed in range(6):  # a random model may end its reply before the publish
        gateway = Gateway(GatewayOptions(model=models[0]))
        trajectory, text = await interrupted(gateway, engine, models, mode, seed, stream)
        if len(trajectory.turns[0].version_spans) == 2:
            break
    first, second = trajectory.turns
    assert second.parent == 0
    assert gateway.pool.continued == (1 if mode == "abort" else 0)
    assert first.finish_reason == ("length" if len(first.output_ids) == LENGTH else "stop")
    old, new = first.version_spans
    assert (old.version, old.start, new.version, new.end) == (0, 0, 1, len(first.output_ids))
    assert old.end == new.start
    assert gateway.renderer.decode(first.output_ids.tolist()) == text
    before = np.abs(recomputed(models[0], trajectory, 0) - first.logprobs)
    after = np.abs(recomputed(models[1], trajectory, 0) - first.logprobs)
    assert before[: old.end].max() < 1e-3
    assert before[new.start :].max() > 1e-2
    assert first.oldest_version() == 0
    assert first.kv_version == (0 if mode == "in_place" else None)
    if mode != "in_place":  # there the new weights go on from the old ones' keys and values
        assert after[new.start :].max() < 1e-3


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_likeliest_ids_are_recorded_with_the_probabilities_that_were_sampled(
    engine: str, models: list[Path], tmp_path: Path, stream: bool
) -> None:
    """A reply that is continued after an abort, in a session of training; not for evaluations."""
    gateway = Gateway(GatewayOptions(model=models[0], journal=tmp_path))
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine)
        sampling = Sampling(0.8, max_tokens=LENGTH, top_logprobs=5)
        access = await client.open_session(task=TASK, seed=1, deadline_s=60, sampling=sampling)
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:
            messages: list[Any] = [{"role": "user", "content": "Go on for ever."}]
            await reply(llm, messages, stream, engine, lambda: publish(engine, models[0], 0, "abort"))
        await client.finish(access.session_id, reward=1.0)
        trajectory = await client.trajectory(access.session_id)
    [turn] = trajectory.turns
    ids = torch.tensor([[*trajectory.prompt_ids(turn).tolist(), *turn.output_ids.tolist()]])
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids).logits[0, len(ids[0]) - len(turn.output_ids) - 1 : -1] / 0.8
    assert turn.top_ids is not None
    assert turn.top_logprobs is not None
    listed = torch.tensor(turn.top_ids.reshape(-1, 5).astype(np.int64))
    own = torch.log_softmax(logits, -1)
    values = torch.tensor(turn.top_logprobs.reshape(-1, 5).astype(np.float32))
    torch.testing.assert_close(values, own.gather(1, listed), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values, own.topk(5).values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_kept_ids_are_recorded_with_logprobs_among_them(
    engine: str, models: list[Path], tmp_path: Path, stream: bool
) -> None:
    """A reply that is continued after an abort. Likeliest ids that were not kept have no probability; a call
    that is exempt records none. The agent's own top-k applies."""
    gateway = Gateway(GatewayOptions(model=models[0], journal=tmp_path))
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine)
        sampling = Sampling(0.8, 0.9, 64, 0.01, narrowed_by_agents=True, max_tokens=LENGTH, top_logprobs=12)
        access = await client.open_session(task=TASK, seed=1, deadline_s=60, sampling=sampling)
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as llm:
            messages: list[Any] = [{"role": "user", "content": "Go on for ever."}]
            await reply(llm, messages, stream, engine, lambda: publish(engine, models[0], 0, "abort"))
            ask: Any = {"model": "m", "messages": messages, "max_tokens": 8}
            await llm.chat.completions.create(**ask, extra_body={"top_k": 3})
            await llm.chat.completions.create(**ask, extra_headers={"X-Tidegate-Train": "no"})
        await client.finish(access.session_id, reward=1.0)
        trajectory = await client.trajectory(access.session_id)
    assert [turn.kept_ids is None for turn in trajectory.turns] == [False, False, True]
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    for turn, top_k in zip(trajectory.turns[:2], (64, 3), strict=True):
        ids = torch.tensor([[*trajectory.prompt_ids(turn).tolist(), *turn.output_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(ids[0]) - len(turn.output_ids) - 1 : -1] / 0.8
        assert turn.kept_ids is not None
        assert turn.kept_counts is not None
        assert turn.kept_counts.max() <= top_k
        excluded = torch.ones_like(logits, dtype=torch.bool)
        places = np.repeat(np.arange(len(turn.output_ids)), turn.kept_counts)
        excluded[torch.tensor(places), torch.tensor(turn.kept_ids.astype(np.int64))] = False
        probs = torch.softmax(logits, -1)
        assert (probs * ~excluded).sum(1).max() < 0.95, "ids were excluded"
        expected = torch.log_softmax(logits.masked_fill(excluded, -torch.inf), -1)
        own = expected.gather(1, torch.tensor(turn.output_ids.astype(np.int64))[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), own, rtol=1e-3, atol=1e-3)
        assert turn.top_ids is not None
        assert turn.top_logprobs is not None
        listed = torch.tensor(turn.top_ids.reshape(-1, 12).astype(np.int64))
        values = torch.tensor(turn.top_logprobs.reshape(-1, 12).astype(np.float32))
        among = expected.gather(1, listed).clamp(min=-10_000)
        torch.testing.assert_close(values, among, rtol=1e-3, atol=1e-3)


async def test_a_reply_under_a_grammar_records_which_tokens_may_be_trained_on(
    engine: str, models: list[Path]
) -> None:
    """The recorded logprob is that of the allowed ids; times their probability it is the policy's own. Where
    the grammar took more than a trace of probability, the token is masked."""
    gateway = Gateway(GatewayOptions(model=models[0], structured_output="grammar"))
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    sampled: list[Any] = []
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine)
        access = await client.open_session(task=TASK, seed=1, sampling=Sampling(0.7, max_tokens=60))
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as llm:
            append = gateway.turns._append
            gateway.turns._append = lambda *told: sampled.append(told[2]) or append(*told)  # type: ignore[method-assign]
            ask: Any = {"model": "m", "messages": [{"role": "user", "content": "1+2?"}]}
            await llm.chat.completions.create(**ask, response_format=form)
        await client.finish(access.session_id, reward=1)
        trajectory = await client.trajectory(access.session_id)
    [turn], [told] = trajectory.turns, sampled
    assert turn.structured == "grammar"
    ids = torch.tensor([[*trajectory.prompt_ids(turn).tolist(), *turn.output_ids.tolist()]])
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids).logits[0, len(ids[0]) - len(turn.output_ids) - 1 : -1] / 0.7
    own = torch.log_softmax(logits, -1).gather(-1, ids[0, -len(turn.output_ids) :, None])[:, 0].numpy()
    assert np.log(told.masses) + turn.logprobs == pytest.approx(own, abs=1e-3)
    assert min(told.masses) < 0.5, "the grammar changed something"
    assert turn.output_mask is not None
    assert turn.output_mask.tolist() == [int(mass >= 1 - MASS_TOLERANCE) for mass in told.masses]


async def test_a_schema_that_the_engine_cannot_follow_is_refused_by_the_agents_name(
    engine: str, models: list[Path]
) -> None:
    gateway = Gateway(GatewayOptions(model=models[0]))
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objet"}}}
    async with served(create_app(gateway)) as url, GatewayClient(url) as client:
        await client.add_engine(engine)
        access = await client.open_session(task=TASK, split="eval", sampling=Sampling(0.0, max_tokens=4))
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as llm:
            ask: Any = {"model": "m", "messages": [{"role": "user", "content": "1+2?"}]}
            with pytest.raises(openai.BadRequestError, match=r"response_format: .*objet") as raised:
                await llm.chat.completions.create(**ask, response_format=form)
            assert raised.value.response.headers["x-should-retry"] == "false"
            assert gateway.pool.errors == 0
            assert (await llm.chat.completions.create(**ask, presence_penalty=1.0)).choices
