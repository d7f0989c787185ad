"""The processes of a run: its engines, its gateway and its agents' process; started together, kept, ended."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import StartError, unwrapped
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.processes.agent_pool import AgentPool, AgentRunner
from tidegate.trainer.processes.provider import Live, ProcessProvider, ServerProcess
from tidegate.trainer.processes.servers import MAX_RESTARTS
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.engines import EngineMembership

PAUSE_S = 1.0
"""After a start that failed: what a dead process held (an address, memory) may be free a moment later."""


@dataclass(slots=True)
class Processes:
    """What a run talks to. `engines` begin with its own, or with those that the settings name."""

    gateway: GatewayClient
    worker: AgentRunner
    engines: EngineMembership


async def start_processes(
    settings: Settings,
    run_dir: Path,
    live: Live,
    guard: TaskSupervisor,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
    parts: ProcessProvider,
) -> Processes:
    """Start everything at once; `stack` ends it, and `guard` learns of a death. Raises StartError."""
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as together:
            own = together.create_task(_start_engines(settings, run_dir, live, stack, parts))
            gate = together.create_task(_start_gateway(settings, run_dir, guard, note, stack, parts))
            agents = together.create_task(_start_agents(settings, run_dir, stack, parts))
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    services, gateway, worker = own.result(), gate.result(), agents.result()
    engines = EngineMembership(gateway, note)
    await engines.open(settings.engine.urls or [service.url for service in services])
    for service in services:
        guard.watch(_keep_engine(service, live, note, engines), service.name)
    note(f"engine, gateway ({gateway.url}) and agents ready in {time.monotonic() - began:.1f} s")
    return Processes(gateway, worker, engines)


async def _start_engines(
    settings: Settings,
    run_dir: Path,
    live: Live,
    stack: contextlib.AsyncExitStack,
    parts: ProcessProvider,
) -> Sequence[ServerProcess]:
    engines = parts.engines(settings, run_dir, live)
    try:
        async with asyncio.TaskGroup() as together:
            for engine in engines:
                stack.push_async_callback(engine.stop)
                together.create_task(engine.start())
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    return engines


async def _keep_engine(
    engine: ServerProcess, live: Live, note: Callable[[str], None], engines: EngineMembership
) -> None:
    """Restart a dead engine with what is live; give up after MAX_RESTARTS."""
    while True:
        why: str | None = await engine.died()
        before = engine.url
        while why is not None:
            version = live()[1]
            why = await _again(engine, why, note)
        note(f"the {engine.name} is back at version {version}")
        await engines.returned(before, engine.url)


async def _again(server: ServerProcess, why: str, note: Callable[[str], None]) -> str | None:
    """Start a server again that is down, and why it is; None, or why it is still. Raises StartError when that
    was done too often."""
    if server.restarts >= MAX_RESTARTS:
        raise StartError(f"{why}, after {server.restarts} restarts; {server.last_words()}")
    note(f"{why}; starting it again")
    try:
        await server.restart()
    except StartError as error:
        await asyncio.sleep(PAUSE_S)
        return str(error)
    return None


async def _start_gateway(
    settings: Settings,
    run_dir: Path,
    guard: TaskSupervisor,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
    parts: ProcessProvider,
) -> GatewayClient:
    journal = run_dir / "gateway"
    if not (run_dir / "ledger.jsonl").exists():  # it belongs to the run whose ledger lies beside it
        await asyncio.to_thread(shutil.rmtree, journal, ignore_errors=True)
    key = admin_key(settings)
    server = parts.gateway(settings, run_dir, key, journal)
    stack.push_async_callback(server.stop)
    url = await server.start()
    client = GatewayClient(url, key)
    guard.watch(_keep_gateway(server, client, note), "gateway")
    stack.push_async_callback(client.close)
    return client


async def _keep_gateway(gateway: ServerProcess, client: GatewayClient, note: Callable[[str], None]) -> None:
    """Restart a dead gateway: its journal holds what it was doing. Give up after MAX_RESTARTS."""
    try:
        while True:
            why: str | None = await gateway.died()
            while why is not None:
                why = await _again(gateway, why, note)
            note("the gateway is back, with the sessions it had")
    except StartError as error:
        client.abort(str(error))  # the run ends now, and what it still has to tell it need not wait
        raise


async def _start_agents(
    settings: Settings, run_dir: Path, stack: contextlib.AsyncExitStack, parts: ProcessProvider
) -> AgentRunner:
    crew = AgentPool(parts.agents(settings, run_dir))
    stack.push_async_callback(crew.close)
    await crew.open()
    return crew


def admin_key(settings: Settings) -> str:
    """There always is one: agents run on the same machines, and loopback alone would not keep them from the
    control plane."""
    return settings.gateway.admin_key or secrets.token_urlsafe(24)
