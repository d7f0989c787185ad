"""Random bodies and histories: never a 5xx, never a reply that is not recorded."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.fakes import Stage, staged
from tests.tiny_tokenizer import TEMPLATES, make_model_dir
from tidegate.gateway.client import SessionAccess
from tidegate.types import Task

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 1.5, "", "x", "auto", "none", [], {}, [None], [[]], {"a": None},
    {"type": "text"}, [{"type": "text", "text": "hi"}], "\ud7ff\U0001f34e", "<|im_end|>", "</tool_call>",
]  # fmt: skip
NAMES = [
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "n", "stop",
    "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "top_logprobs", "user",
    "response_format", "frequency_penalty", "chat_template_kwargs", "parallel_tool_calls", "unheard_of",
    "role", "content", "tool_calls", "tool_call_id", "name", "function", "arguments", "id", "type", "text",
    "function_call", "reasoning_content",
]  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def junk(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return rng.choice(VALUES)
    if kind < 0.7:
        return [junk(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(NAMES): junk(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def spoiled(rng: random.Random, value: Any) -> Any:
    """The value with something in it replaced, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        value = dict(value)
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[key]
        elif rng.random() < 0.2:
            value[rng.choice(NAMES)] = junk(rng)
        else:
            value[key] = spoiled(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], spoiled(rng, value[index]), *value[index + 1 :]]
    return junk(rng)


class Client:
    """One random client of one session; checks every answer it gets."""

    def __init__(self, stage: Stage, access: SessionAccess, http: aiohttp.ClientSession, seed: str) -> None:
        self.stage = stage
        self.access = access
        self.http = http
        self.rng = random.Random(seed)
        self.history: list[Any] = []
        self.delivered = 0

    async def run(self, cases: int) -> None:
        for _ in range(cases):
            await self.case()
        summary = await self.stage.client.finish(self.access.session_id, reward=0)
        assert summary.turns == self.delivered
        await self.stage.client.delete_session(self.access.session_id)

    async def case(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            self.stage.say(rng.choice(["Four.", f"So. {CALL}", "<tool_call>oops", "é🍎", ""]))
        messages = [*self.history[: rng.randint(0, len(self.history) + 3)], {"role": "user", "content": "?"}]
        body: Any = {"model": "m", "messages": messages, "stream": rng.random() < 0.3}
        if rng.random() < 0.5:
            body["tools"] = [TOOL]
        for _ in range(rng.choice([0, 0, 1, 2])):
            body = spoiled(rng, body)
        data = orjson.dumps(body) if rng.random() < 0.95 else rng.randbytes(rng.randint(0, 30))
        headers = {"Authorization": f"Bearer {self.access.api_key}"}
        url = f"{self.access.base_url}/chat/completions"
        async with self.http.post(url, data=data, headers=headers) as response:
            answer = await response.read()
        assert response.status in (200, 400), (response.status, answer, body)
        if response.status == 400:
            assert b"failed to read" not in answer, (answer, body)
            assert response.headers["x-should-retry"] == "false"
            return
        self.delivered += 1
        if not answer.startswith(b"data:"):
            self.history = [*body["messages"], orjson.loads(answer)["choices"][0]["message"]]


async def drive(model: Path, clients: int, cases: int, seed: int) -> None:
    async with staged(model) as stage, aiohttp.ClientSession() as http:
        task = Task("t", "none", [], answer="4711")
        accesses = [await stage.client.open_session(task=task) for _ in range(clients)]
        await asyncio.gather(
            *(Client(stage, access, http, f"{seed}/{n}").run(cases) for n, access in enumerate(accesses))
        )
        assert stage.gateway.metrics.undelivered_turns == 0
        assert stage.gateway.failed is None


@pytest.mark.parametrize("template", ["mistral", "qwen3"])
async def test_no_body_makes_the_gateway_fail(tmp_path: Path, template: str) -> None:
    await drive(make_model_dir(tmp_path / "tiny", template), clients=4, cases=40, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("template", sorted(TEMPLATES))
async def test_ten_thousand_bodies(tmp_path: Path, template: str) -> None:
    await drive(make_model_dir(tmp_path / "tiny", template), clients=20, cases=100, seed=2)
