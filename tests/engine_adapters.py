"""LoRA adapters on a real server, SGLang's or vLLM's: the trainer publishes them, the gateway names them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine_contract import LONG, recomputed
from tests.integration.engine.engine_http import Client
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tests.waiting import eventually
from tidegate.config import TrainerSettings
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult
from tidegate.service.service import Service
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter

RANK = 8
PROMPT = list(range(1, 65))


@dataclass
class Adapters:
    """Three adapters of one base model, and each merged."""

    base: Path
    adapters: list[Path]
    merged: list[Path]


def make_adapters(directory: Path) -> Adapters:
    base = directory / "base"
    make_tiny_model(base, vocab=640, hidden=128)
    make_tokenizer().save_pretrained(base)
    made = Adapters(base, [], [])
    for seed in range(3):
        policy = Policy.load(base, TrainerSettings(lora={"rank": RANK, "publish": "adapter"}), seed)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.05)
        made.adapters.append(policy.save_adapter(directory / f"adapter{seed}"))
        made.merged.append(policy.save_weights(directory / f"merged{seed}"))
    return made


class Published:
    """A server behind the gateway's pool, and the trainer's publisher."""

    def __init__(
        self, given: Adapters, directory: Path, make: Callable[[Callable[[], tuple[Path, int]]], Service]
    ) -> None:
        self.given = given
        self.service = make(lambda: self.publisher.startable)
        self.pool = EnginePool(PoolOptions(probe_every_s=3600.0))  # by announcements alone
        self.url = ""
        self.publisher = Publisher(
            writer=VersionWriter(directory=directory / "weights", save_weights=self._save),
            engines=lambda: [self.url],
            cancel_stale=self._nothing,
            quarantine=self._nothing,
            restore=self._nothing,
            announce=self.announce,
            current=(given.adapters[0], 0),
            retry_s=0.0,
        )

    async def _nothing(self, *_: object) -> None: ...

    def _save(self, directory: Path, dtype: str) -> None:
        version = int(directory.name.removeprefix("v"))
        shutil.copytree(self.given.adapters[version % 3], directory)

    async def start(self) -> None:
        self.url = await self.service.start()
        await self.announce(self.url)

    async def announce(self, url: str) -> None:
        """As the gateway does when the trainer admits an engine."""
        await self.pool.add(EngineRecord(url), wait_s=30)

    async def stop(self) -> None:
        await self.pool.close()
        await self.service.stop()

    @property
    def endpoint(self) -> EngineEndpoint:
        (endpoint,) = self.pool.engines()
        return endpoint

    async def sample(
        self, prompt: list[int], count: int, seen: Callable[[int], None] = lambda _: None
    ) -> GenerateResult:
        params = {"temperature": 1.0, "ignore_eos": True}
        order = GenerateRequest(np.array(prompt, np.int32), params, count, stream=True)
        deadline = asyncio.get_running_loop().time() + 240
        return await self.pool.sample(order, Affinity("1", "x"), deadline, lambda ids: seen(len(ids)))

    def check(self, prompt: list[int], reply: GenerateResult) -> list[int]:
        """Every token has the logprob of the merged weights of its version; returns the versions."""
        ends = [0, *(span.end for span in reply.spans)]
        assert ends == [*(span.start for span in reply.spans), len(reply.ids)], "each has a version"
        for version, start, end in reply.spans:
            expected = recomputed(self.given.merged[version % 3], prompt, reply.ids)
            assert reply.logprobs[start:end] == pytest.approx(expected[start:end], abs=1e-4)
        return [span.version for span in reply.spans]


async def publish_during_requests(stand: Published) -> None:
    """Two publishes while four replies are sampled; no token is of another version than it says."""
    await stand.start()
    counts = [0] * 4

    def note(at: int) -> Callable[[int], None]:
        return lambda count: counts.__setitem__(at, count)

    prompts = [[*PROMPT, 100 + number] for number in range(4)]
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [group.create_task(stand.sample(one, LONG, note(at))) for at, one in enumerate(prompts)]
        for version in (1, 2):
            least = 20 * version
            await eventually(lambda least=least: min(counts) >= least, 120)
            await stand.publisher.publish(version)
        assert not any(task.done() for task in tasks), "the case proves too little"
    for prompt, task in zip(prompts, tasks, strict=True):
        assert stand.check(prompt, task.result()) == [0, 1, 2]


async def cache_is_of_one_version(stand: Published) -> None:
    """A prefix that an earlier version has cached is computed again."""
    prompt = list(range(200, 264))
    before = [await stand.sample(prompt, 8) for _ in range(2)]
    assert [one.cached_tokens > 0 for one in before] == [False, True]
    await stand.publisher.publish(3)
    after = await stand.sample(prompt, 8)
    assert after.cached_tokens == 0
    assert stand.check(prompt, after) == [3]


async def restarted_server_has_the_adapter(stand: Published) -> None:
    assert stand.service.pid is not None
    os.kill(stand.service.pid, signal.SIGKILL)
    await stand.service.wait_for_exit()
    await stand.service.restart()
    stand.url = stand.service.url
    await stand.announce(stand.url)
    reply = await stand.sample(PROMPT, 20)
    assert stand.check(PROMPT, reply) == [stand.publisher.current[1]]


async def rows_of_two_adapters(engine: Client, given: Adapters, names: dict[str, int]) -> None:
    """Requests of several adapters run at the same time, with the same prompt."""

    async def one(name: str, seed: int) -> None:
        params = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "lora_path": name}
        status, reply = await engine.post("/generate", body)
        assert status == 200, reply
        said = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        expected = recomputed(given.merged[names[name]], PROMPT, reply["output_ids"])
        assert said == pytest.approx(expected, abs=1e-4), name

    async with asyncio.timeout(240):
        await asyncio.gather(*(one(name, seed) for name in names for seed in range(3)))
