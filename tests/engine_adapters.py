"""LoRA adapters on a real server, SGLang's or vLLM's: the trainer publishes them, the gateway names them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from tests.engine_contract import LONG, recomputed
from tests.integration.engine.engine_http import Client
from tests.tiny import make_tiny_model
from tests.tiny_tokenizer import make_tokenizer
from tests.waiting import eventually
from tidegate.config import Settings, TrainerSettings
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult
from tidegate.service.service import LOOPBACK, Service
from tidegate.trainer.policy.policy import Policy
from tidegate.trainer.processes.servers import engine_server
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter

LORA: dict[str, Any] = {"rank": 8, "publish": "adapter"}
LORA_OF = {"a": {}, "b": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}}
"""Two policies: SGLang and vLLM pad the adapters of the second one."""
PROMPT = list(range(1, 65))


@dataclass
class Adapters:
    """Three adapters of one base model, and each merged."""

    base: Path
    adapters: list[Path]
    merged: list[Path]


def make_adapters(directory: Path, name: str = "", **lora: Any) -> Adapters:
    base = directory / "base"
    if not base.exists():
        make_tiny_model(base, vocab=640, hidden=128)
        make_tokenizer().save_pretrained(base)
    made = Adapters(base, [], [])
    for seed in range(3):
        policy = Policy.load(base, TrainerSettings(lora=LORA | lora), seed)
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.05)
        made.adapters.append(policy.save_adapter(directory / name / f"adapter{seed}"))
        made.merged.append(policy.save_weights(directory / name / f"merged{seed}"))
    return made


class Published:
    """A server behind the gateway's pool, and the trainer's publisher.

    `given` has the adapters by policy, of a single one under "". With several the server starts without any.
    """

    def __init__(
        self,
        given: dict[str, Adapters],
        directory: Path,
        make: Callable[[Callable[[], tuple[Path, int]]], Service],
    ) -> None:
        self.given = given
        self.serves_base = False
        """Whether it serves the base model, too, of a frozen policy."""
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
            serves=lambda url: min(given),
            current=(given[""].adapters[0] if "" in given else given["a"].base, 0),
            retry_s=0.0,
        )

    async def _nothing(self, *_: object) -> None: ...

    def _save(self, directory: Path, dtype: str) -> None:
        version = int(directory.name.removeprefix("v"))
        for name, given in self.given.items():
            shutil.copytree(given.adapters[version % 3], directory / name)

    async def start(self) -> None:
        self.url = await self.service.start()
        await self.announce(self.url)
        if "" not in self.given:
            await self.publisher.publish_start()

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
        self, prompt: list[int], count: int, seen: Callable[[int], None] = lambda _: None, policy: str = ""
    ) -> GenerateResult:
        params = {"temperature": 1.0, "ignore_eos": True}
        order = GenerateRequest(np.array(prompt, np.int32), params, count, stream=True, adapter=policy)
        deadline = asyncio.get_running_loop().time() + 240
        return await self.pool.sample(order, Affinity("1", "x"), deadline, lambda ids: seen(len(ids)))

    def check(self, prompt: list[int], reply: GenerateResult, policy: str = "") -> list[int]:
        """Every token has the logprob of the merged weights of its version; returns the versions.

        Beside those of several policies, "" is the base model.
        """
        ends = [0, *(span.end for span in reply.spans)]
        assert ends == [*(span.start for span in reply.spans), len(reply.ids)], "each has a version"
        for version, start, end in reply.spans:
            base = next(iter(self.given.values())).base
            whole = self.given[policy].merged[version % 3] if policy in self.given else base
            expected = recomputed(whole, prompt, reply.ids)
            assert reply.logprobs[start:end] == pytest.approx(expected[start:end], abs=1e-4)
        return [span.version for span in reply.spans]


async def publish_during_requests(stand: Published) -> None:
    """Two publishes while replies are sampled; no token is of another version or policy than it says."""
    await stand.start()
    policies = [""] * 4 if "" in stand.given else [*stand.given, *stand.given, *[""] * stand.serves_base]
    counts = [0] * len(policies)

    def note(at: int) -> Callable[[int], None]:
        return lambda count: counts.__setitem__(at, count)

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(stand.sample(PROMPT, 3 * LONG, note(at), policy))
            for at, policy in enumerate(policies)
        ]
        for version in (1, 2):
            least = 20 * version
            await eventually(lambda least=least: min(counts) >= least, 120)
            await stand.publisher.publish(version)
        assert not any(task.done() for task in tasks), "the case proves too little"
    for policy, task in zip(policies, tasks, strict=True):
        versions = stand.check(PROMPT, task.result(), policy)
        assert policy not in stand.given or versions == [0, 1, 2]


async def cache_is_of_one_version(stand: Published) -> None:
    """A prefix that an earlier version has cached is computed again."""
    prompt = list(range(200, 264))
    before = [await stand.sample(prompt, 8) for _ in range(2)]
    assert [one.cached_tokens > 0 for one in before] == [False, True]
    await stand.publisher.publish(3)
    after = await stand.sample(prompt, 8)
    assert after.cached_tokens == 0
    assert stand.check(prompt, after) == [3]


async def restarted_server_has_the_adapters(stand: Published) -> None:
    assert stand.service.pid is not None
    os.kill(stand.service.pid, signal.SIGKILL)
    await stand.service.wait_for_exit()
    await stand.service.restart()
    stand.url = stand.service.url
    await stand.announce(stand.url)
    for policy in stand.given:
        reply = await stand.sample(PROMPT, 20, policy=policy)
        assert stand.check(PROMPT, reply, policy) == [stand.publisher.current[1]]


async def adapters_of_two_policies(
    kind: str, python: str, arguments: list[str], directory: Path
) -> list[str]:
    """A run's engine with two policies, and a frozen one; returns the names of the adapters at the server."""
    given = {name: make_adapters(directory, name, **lora) for name, lora in LORA_OF.items()}
    policies = {"base": {"train": False}} | {name: {"lora": LORA | one} for name, one in LORA_OF.items()}
    settings = Settings.model_validate({
        "model": {"path": given["a"].base},
        "engine": {"kind": kind, "python": python, "arguments": arguments},
        "trainer": {"lora": LORA},
        "policies": policies,
    })  # fmt: skip
    first, served = next((first, names) for first, names in settings.engine_sets.items() if "a" in names)
    own = settings.of_engines(first)
    stand = Published(
        given, directory, lambda now: engine_server(own, "engine", 0, None, directory, LOOPBACK, 0, now)
    )
    stand.serves_base = "base" in served
    try:
        await publish_during_requests(stand)
        await restarted_server_has_the_adapters(stand)
        async with aiohttp.ClientSession() as http:
            _, models = await Client(stand.url, http).get("/v1/models")
        return [one["id"] for one in models.get("data", [])[1:]]
    finally:
        await stand.stop()


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
