"""The processes of a run: its engines, its gateway and its agents' process; started together, kept, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.config import EngineSettings, Settings
from tidegate.errors import StartError, unwrapped
from tidegate.gateway.client import ADMIN_KEY, GatewayClient
from tidegate.services import Service
from tidegate.tethered import READY_S
from tidegate.trainer.engines import Engines
from tidegate.trainer.guard import Guard
from tidegate.trainer.sglang import SGLangServer
from tidegate.trainer.vllm import VLLMServer
from tidegate.trainer.workers import AgentWorker

MAX_ENGINE_RESTARTS = 5
MAX_GATEWAY_RESTARTS = 5

Live = Callable[[], tuple[Path, int]]
"""The weights that engines should serve at this moment, and their version."""


@dataclass(slots=True)
class Processes:
    """What a run talks to. `engines` begin with its own, or with those that the settings name."""

    gateway: GatewayClient
    worker: AgentWorker
    engines: Engines


async def start_processes(
    settings: Settings,
    run_dir: Path,
    live: Live,
    guard: Guard,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
) -> Processes:
    """Start everything at once; `stack` ends it, and `guard` learns of a death. Raises StartError."""
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as together:
            own = together.create_task(_start_engines(settings, run_dir, live, stack))
            gate = together.create_task(_start_gateway(settings, run_dir, guard, note, stack))
            agents = together.create_task(_start_worker(settings, run_dir, stack))
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    services, gateway, worker = own.result(), gate.result(), agents.result()
    engines = Engines(gateway, note)
    await engines.open(settings.engine.urls or [service.url for service in services])
    for service in services:
        guard.watch(_keep_engine(service, live, note, engines), service.name)
    note(f"engine, gateway ({gateway.url}) and agents ready in {time.monotonic() - began:.1f} s")
    return Processes(gateway, worker, engines)


def engine_arguments(settings: Settings, live: Live) -> list[str]:
    """The command line of an embedded engine that serves what is live."""
    weights, version = live()
    engine = settings.engine
    return [
        "--model", str(weights), "--weight-version", str(version), "--device", engine.device,
        "--dtype", engine.dtype, "--threads", str(engine.threads),
        "--max-slots", str(engine.max_slots), "--max-context", str(engine.max_context),
        "--prefix-cache-mb", str(engine.prefix_cache_mb),
    ]  # fmt: skip


def restart_s(settings: EngineSettings) -> float:
    """How long an engine that died may take until it serves again."""
    return READY_S if settings.kind != "embedded" else Service.ready_s


def engine_services(settings: Settings, run_dir: Path, live: Live) -> list[Service]:
    """The engines' processes, not started: `engine`, or `engine-1`, `engine-2` … where there are several."""
    count = settings.engine.count
    names = ["engine"] if count == 1 else [f"engine-{number}" for number in range(1, count + 1)]

    def service(index: int, name: str) -> Service:
        def own() -> tuple[Path, int]:
            return pinned(live, run_dir / "weights", name)

        if settings.engine.kind == "sglang":
            return SGLangServer(settings.engine, own, run_dir, name, index)
        if settings.engine.kind == "vllm":
            return VLLMServer(settings.engine, own, run_dir, name, index)
        return Service("engine", lambda: engine_arguments(settings, own), run_dir, name=name)

    return [service(index, name) for index, name in enumerate(names)]


def pinned(live: Live, published: Path, name: str) -> tuple[Path, int]:
    """What is live, in a place where it stays until the engine `name` is started anew.

    Published weights are removed after two more versions, which may be before a starting engine has read
    them; so it gets hard links of its own to them. Weights from elsewhere stay where they are.
    """
    weights, version = live()
    if weights.parent != published:
        return weights, version
    place = published / f"of-{name}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(weights, place, copy_function=os.link)
    return place, version


async def _start_engines(
    settings: Settings,
    run_dir: Path,
    live: Live,
    stack: contextlib.AsyncExitStack,
) -> list[Service]:
    engines = [] if settings.engine.urls else engine_services(settings, run_dir, live)
    try:
        async with asyncio.TaskGroup() as together:
            for engine in engines:
                stack.push_async_callback(engine.stop)
                together.create_task(engine.start())
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    return engines


async def _keep_engine(engine: Service, live: Live, note: Callable[[str], None], engines: Engines) -> None:
    """Restart a dead engine with what is live; give up after MAX_ENGINE_RESTARTS."""
    while True:
        how = await engine.died()
        if engine.restarts >= MAX_ENGINE_RESTARTS:
            raise StartError(f"{how}, after {engine.restarts} restarts; {engine.last_words()}")
        note(f"{how}; starting it again")
        version, before = live()[1], engine.url
        await engine.restart()
        note(f"the {engine.name} is back at version {version}")
        await engines.returned(before, engine.url)


async def _start_gateway(
    settings: Settings,
    run_dir: Path,
    guard: Guard,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
) -> GatewayClient:
    journal = run_dir / "gateway"
    if not (run_dir / "ledger.jsonl").exists():  # it belongs to the run whose ledger lies beside it
        await asyncio.to_thread(shutil.rmtree, journal, ignore_errors=True)
    service, key = gateway_service(settings, run_dir, journal)
    stack.push_async_callback(service.stop)
    url = await service.start()
    guard.watch(_keep_gateway(service, note), "gateway")
    client = GatewayClient(url, key)
    stack.push_async_callback(client.close)
    return client


def gateway_service(settings: Settings, run_dir: Path, journal: Path | None = None) -> tuple[Service, str]:
    """The gateway's process, and its admin key. With a `journal` it can be restarted in mid-run.

    There always is one: agents run on the same machine, and loopback alone would not keep them from the
    control plane.
    """
    key = settings.gateway.admin_key or secrets.token_urlsafe(24)
    port = settings.gateway.port
    arguments = [*gateway_arguments(settings), *(["--journal", str(journal)] if journal is not None else [])]
    host = settings.gateway.host
    return Service("gateway", lambda: arguments, run_dir, port=port, secrets={ADMIN_KEY: key}, host=host), key


def gateway_arguments(settings: Settings) -> Sequence[str]:
    """The command line of a gateway without engines; they are added when they are ready."""
    return [
        "--model", str(settings.model.path), "--host", settings.gateway.host,
        "--tool-parser", settings.gateway.tool_parser, "--shards", str(settings.gateway.shards),
        "--env", settings.env.use, "--env-options", json.dumps(settings.env.options),
    ]  # fmt: skip


async def _keep_gateway(gateway: Service, note: Callable[[str], None]) -> None:
    """Restart a dead gateway: its journal holds what it was doing. Give up after MAX_GATEWAY_RESTARTS."""
    while True:
        how = await gateway.died()
        if gateway.restarts >= MAX_GATEWAY_RESTARTS:
            raise StartError(f"{how}, after {gateway.restarts} restarts; {gateway.last_words()}")
        note(f"{how}; starting it again")
        await gateway.restart()
        note("the gateway is back, with the sessions it had")


async def _start_worker(settings: Settings, run_dir: Path, stack: contextlib.AsyncExitStack) -> AgentWorker:
    worker = await AgentWorker.start(
        settings.agent.use, settings.agent.options, run_dir / "logs" / "agent.log"
    )
    stack.push_async_callback(worker.close)
    return worker
