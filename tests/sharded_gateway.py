"""A sharded gateway, in this process or as the command starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.fakes import FakeEngine, eventually, served
from tests.remote_workers import WORKER_KEY
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.client import ADMIN_KEY, GatewayClient, SessionAccess
from tidegate.gateway.engines.engine import PoolOptions
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.app import create_app
from tidegate.gateway.options import GatewayOptions, PolicyModel
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.sessions.limits import SessionLimits
from tidegate.gateway.sharding.router import ShardRouter
from tidegate.gateway.sharding.shard import Shard, id_prefix, shard_of_group
from tidegate.types import Task

TASK = Task("t1", "sums", [{"role": "user", "content": "1+2?"}])
ASK: list[Any] = [{"role": "user", "content": "1+2?"}]
SHARDS = 2


def groups(test: str) -> list[str]:
    """A group's id for each shard, in their order; no two tests share one, for a group is there once."""
    names = (f"{test} {number}" for number in range(50))
    found = {shard_of_group(name, SHARDS): name for name in names}
    return [found[index] for index in range(SHARDS)]


@dataclass
class Site:
    url: str
    client: GatewayClient
    engine: FakeEngine
    epoch: int = 0

    def new_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    @contextlib.asynccontextmanager
    async def llm(self, access: SessionAccess, base_url: str | None = None) -> AsyncIterator[AsyncOpenAI]:
        made = AsyncOpenAI(base_url=base_url or access.base_url, api_key=access.api_key)
        async with made:
            yield made

    async def episode(self, group_id: str | None, slot: int = 0) -> SessionAccess:
        access = await self.client.open_session(task=TASK, group_id=group_id, slot=slot, deadline_s=60)
        async with self.llm(access) as llm:
            await llm.chat.completions.create(model="m", messages=ASK)
        await self.client.finish(access.session_id, reward=1.0)
        return access

    async def sealed(self, group_id: str) -> None:
        access = await self.episode(group_id)
        await self.client.seal_group(group_id, "t1", [access.session_id])


class Inside(Shard):
    """A shard in this process, which never exits."""

    def __init__(
        self, index: int, model: Path, stack: contextlib.AsyncExitStack, policies: Sequence[str] = ()
    ) -> None:
        super().__init__(index, [], model, {"admin_key": "admin"})
        options = GatewayOptions(
            model,
            admin_key="admin",
            worker_key=WORKER_KEY,
            id_prefix=id_prefix(index),
            limits=SessionLimits(turns=9),
            pool=PoolOptions(shards=SHARDS),
            policies={name: PolicyModel(model) for name in policies},
        )
        self._app = create_app(Gateway(options))
        self._stack = stack
        self._url = ""

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> None:
        self._url = await self._stack.enter_async_context(served(self._app))
        self.up.set()

    async def stop(self) -> None: ...

    async def supervise(self, _: Any) -> None:
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def inside(folder: Path) -> AsyncIterator[Site]:
    """The same without processes."""
    model = make_model_dir(folder / "tiny")
    async with contextlib.AsyncExitStack() as stack:
        engine = await fake_engine(model, stack)
        shards = contextlib.AsyncExitStack()
        await stack.enter_async_context(shards)
        router = ShardRouter([Inside(index, model, shards) for index in range(SHARDS)], "admin", pytest.fail)
        url = await stack.enter_async_context(served(router.create_app()))
        client = await stack.enter_async_context(GatewayClient(url, "admin"))
        await client.add_engine(engine.url)
        yield Site(url, client, engine)


async def fake_engine(model: Path, stack: contextlib.AsyncExitStack) -> FakeEngine:
    renderer = Renderer.load(model)
    engine = FakeEngine(renderer.decode, stop_id=renderer.stop_ids[0])
    await engine.start()
    stack.push_async_callback(engine.stop)
    return engine


@contextlib.asynccontextmanager
async def sharded(folder: Path, *options: str) -> AsyncIterator[Site]:
    """A router and its shards, as the command line starts them."""
    model, announce, stack = (
        make_model_dir(folder / "tiny"),
        folder / "router.json",
        contextlib.AsyncExitStack(),
    )
    engine = await fake_engine(model, stack)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate", "gateway", "--model.path", str(model), f"--gateway.shards={SHARDS}",
        "--gateway.port=0", "--announce", str(announce), "--owned", "--limits.turns=9", *options,
        stdin=subprocess.PIPE, env={**os.environ, ADMIN_KEY: "admin", "TIDEGATE_WORKER_KEY": WORKER_KEY},
    )  # fmt: skip
    try:
        await eventually(lambda: announce.exists() or process.returncode is not None, 90)
        url = json.loads(announce.read_text())["url"]
        async with GatewayClient(url, "admin") as client:
            await client.add_engine(engine.url)
            yield Site(url, client, engine)
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await stack.aclose()
