"""SGLang's own router in front of two embedded engines forwards generation, but no control calls."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.fakes import eventually, served
from tests.integration.gateway.test_engine import publish, recomputed
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions
from tidegate.types import Sampling, Task

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"
    ),
]
LENGTH = 150
Process = asyncio.subprocess.Process


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    tokenizer = make_tokenizer("qwen2")
    for version in (0, 1):
        make_tiny_model(tmp_path / str(version), vocab=len(tokenizer), seed=version)
        tokenizer.save_pretrained(str(tmp_path / str(version)))
    return [tmp_path / "0", tmp_path / "1"]


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def engine(stack: contextlib.AsyncExitStack, model: Path, announce: Path) -> tuple[str, Process]:
    process = await stack.enter_async_context(
        running("tidegate", "engine", "--model.path", str(model), "--port", "0", "--announce", str(announce),
                "--owned")
    )  # fmt: skip
    await eventually(announce.exists, 60)
    return json.loads(await asyncio.to_thread(announce.read_text))["url"], process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


async def router(stack: contextlib.AsyncExitStack, workers: list[str]) -> str:
    """The router, once it knows its workers.

    It asks `/model_info` whether they are well: `/health` of an engine that is paused says no.
    """
    port = free_port()
    await stack.enter_async_context(
        running("sglang_router.launch_router", "--port", str(port), "--prometheus-port", str(free_port()),
                "--worker-urls", *workers, "--health-check-endpoint", "/model_info",
                "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
                "--policy", "round_robin", "--log-level", "error")
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        for _ in workers:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.post(url + "/generate", json=body) as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.1)
    return url


async def totals(workers: list[str]) -> list[int]:
    async with aiohttp.ClientSession() as http:
        replies = [await (await http.get(url + "/model_info")).json() for url in workers]
    return [reply["tokens_sampled"] for reply in replies]


async def control(workers: list[str], path: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as http:
        for url in workers:
            async with http.post(url + path, json=body) as response:
                assert response.status == 200


async def until(workers: list[str], wanted: Callable[[int], bool]) -> None:
    """Until so many requests are in the engines."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(20):
        while True:
            infos = [await (await http.get(url + "/model_info")).json() for url in workers]
            if wanted(sum(info["num_running"] + info["num_waiting"] for info in infos)):
                return
            await asyncio.sleep(0.01)


async def chat(llm: AsyncOpenAI, stream: bool, tokens: int) -> str:
    messages: list[Any] = [{"role": "user", "content": "Go on for ever."}]
    options: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream}
    reply = await llm.chat.completions.create(**options)
    if not stream:
        return reply.choices[0].message.content or ""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


@pytest.mark.timeout(300)
async def test_a_router_is_one_engine_whose_workers_take_the_control_calls(
    models: list[Path], tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        workers, processes = [], []
        for number in range(2):
            url, process = await engine(stack, models[0], tmp_path / f"engine-{number}.json")
            workers.append(url)
            processes.append(process)
        front = await router(stack, workers)
        gateway = Gateway(GatewayOptions(model=models[0]))
        base = await stack.enter_async_context(served(create_app(gateway)))
        client = await stack.enter_async_context(GatewayClient(base))
        await client.add_engine(front, control=workers)
        [row] = await client.list_engines()
        assert (row["url"], row["control"], row["healthy"]) == (front, workers, True)
        assert row["limit"] == 2 * 2 * 64, "twice the slots of both"

        async def opened(seed: int) -> tuple[str, AsyncOpenAI]:
            """A session whose reply does not begin with `<think>`, after which all text is reasoning."""
            access = await client.open_session(
                task=Task("t", "none", []),
                deadline_s=120,
                sampling=Sampling(0.8, max_tokens=LENGTH),
                seed=seed,
            )
            llm = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
            return access.session_id, await stack.enter_async_context(llm)

        # A publish to the workers in mid-reply, in the mode that needs the gateway to continue.
        sessions = [await opened(seed) for seed in range(4)]
        before = await totals(workers)
        calls = [asyncio.create_task(chat(llm, i % 2 == 0, LENGTH)) for i, (_, llm) in enumerate(sessions)]
        while not all(now > then + 10 for now, then in zip(await totals(workers), before, strict=True)):
            assert not all(call.done() for call in calls)
        await asyncio.gather(*(publish(url, models[1], 1, "abort") for url in workers))
        texts = await asyncio.gather(*calls)
        straddling = 0
        for (session_id, _), text in zip(sessions, texts, strict=True):
            await client.finish(session_id, reward=0.0)
            trajectory = await client.trajectory(session_id)
            [turn] = trajectory.turns
            assert gateway.renderer.decode(turn.output_ids.tolist()) == text
            straddling += len(turn.version_spans) == 2
            assert turn.version_spans[-1].end == len(turn.output_ids)
            for version, start, end in turn.version_spans:
                wrong = np.abs(recomputed(models[version], trajectory, 0) - turn.logprobs)[start:end]
                assert wrong.max() < 1e-3
        assert straddling >= 1

        # A client that leaves: the abort goes to the workers, for the router knows no such call.
        await control(workers, "/pause_generation", {"mode": "in_place"})
        _, llm = await opened(4)
        leaving = asyncio.create_task(chat(llm, False, LENGTH))
        await until(workers, lambda requests: requests == 1)
        leaving.cancel()
        await until(workers, lambda requests: requests == 0)
        await control(workers, "/continue_generation", {})

        # One worker dies: the router and the gateway go on with the other one.
        processes[0].kill()
        await processes[0].wait()
        _, llm = await opened(4)
        assert await chat(llm, False, 4)
        assert (await client.list_engines())[0]["healthy"]
