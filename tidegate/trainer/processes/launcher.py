"""Starts a run's engines, gateway and agents' processes, and restarts failed servers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import GatewayError, StartError
from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY, GatewayClient
from tidegate.service.api_key import ENV_KEY, engine_key, key_from_environment
from tidegate.service.process import run_together
from tidegate.trainer.processes.agents import GatewayWorkers, supervise_agents
from tidegate.trainer.processes.provider import (
    CurrentWeights,
    GatewayAccess,
    ProcessProvider,
    ServerProcess,
)
from tidegate.trainer.processes.servers import MAX_RESTARTS
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.layout import engine_weights, is_fixed

KEY_FILE = "worker.key"
PAUSE_S = 1.0
"""Delay after a failed start, in which an exited process's address or memory may become free."""


@dataclass(slots=True)
class Processes:
    """Clients of a run's processes. `engines` starts with the run's own engines or those of `engine.urls`."""

    gateway: GatewayClient
    engines: EngineMembership


async def start_processes(
    settings: Settings,
    run_dir: Path,
    current: CurrentWeights,
    supervisor: TaskSupervisor,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
    provider: ProcessProvider,
) -> Processes:
    """Start all processes at the same time; raises StartError if one does not start.

    `current` returns the weights that engines start with. `supervisor` runs the tasks that restart failed
    servers, and closing `stack` stops all processes.
    """

    began = time.monotonic()
    engine_key()  # before the agents' processes, which must not inherit it
    journal = run_dir / "gateway"
    keys = {"admin_key": admin_key(settings)}
    if settings.agent.source == "remote" and settings.gateway.url is None:
        keys["worker_key"] = worker_key(run_dir)
    own: list[tuple[ServerProcess, str, CurrentWeights]] = []
    """The run's engines, the policies that each serves, and what it loads."""
    for policy in settings.engine_sets:
        of_policy = partial(_weights_of, settings, current, policy)
        started = provider.engines(settings, run_dir, of_policy, policy)
        own += [(server, policy, of_policy) for server in started]
    servers = [server for server, _, _ in own]
    for server in servers:
        # Before it starts: a start that fails may leave a process.
        stack.push_async_callback(server.stop)

    async def start_gateway() -> GatewayClient:
        if settings.gateway.url is not None:
            return await _connect_to_gateway(settings, stack)
        if settings.agent.source != "client":
            keys.update(await _start_environments(settings, run_dir, supervisor, note, stack, provider))
        gateway_server = provider.gateway(settings, run_dir, keys, journal)
        stack.push_async_callback(gateway_server.stop)
        if not (run_dir / "ledger.jsonl").exists():  # a journal without a ledger is of another run
            await asyncio.to_thread(shutil.rmtree, journal, ignore_errors=True)
        url = await gateway_server.start()
        client = GatewayClient(url, keys["admin_key"])
        supervisor.watch(_supervise_gateway(gateway_server, client, note), "gateway")
        stack.push_async_callback(client.close)
        address = settings.gateway.public_url or url
        if settings.agent.source == "client":
            note(f"clients: tidegate.client.Client({address!r}, key), with a key of {settings.gateway.keys}")
        if settings.agent.source == "remote":
            key_file = shlex.quote(str(run_dir / KEY_FILE))
            note(f"workers: tidegate worker --gateway {address} --key-file {key_file} --agent FILE.py:NAME")
        return client

    async def start_gateway_and_agents() -> GatewayClient:
        client = await start_gateway()
        access = GatewayAccess(client.url, client.agents_key)
        processes = provider.agents(settings, run_dir, access)
        for process in processes:
            stack.push_async_callback(process.stop)
        await run_together(process.start() for process in processes)
        workers = GatewayWorkers(client, await stack.enter_async_context(GatewayClient(*access)))
        for process in processes:
            supervisor.watch(supervise_agents(process, workers, note), process.name)
        return client

    jobs: list[Coroutine[Any, Any, Any]] = [start_gateway_and_agents()]
    gateway: GatewayClient = (await run_together(jobs + [server.start() for server in servers]))[0]
    engines = EngineMembership(gateway, note)
    urls = settings.engine.urls
    serves = [] if urls else [policy for _, policy, _ in own]
    frozen = [name for name in settings.engine_sets if is_fixed(settings, name)]
    await engines.open(urls or [server.url for server in servers], serves, frozen)
    for server, _, weights in own:
        at_version = partial(_at_version, weights)
        supervisor.watch(supervise(server, note, at_version, engines.on_restart), server.name)
    note(f"engine, gateway ({gateway.url}) and agents ready in {time.monotonic() - began:.1f} s")
    return Processes(gateway, engines)


def _weights_of(settings: Settings, current: CurrentWeights, policy: str) -> tuple[Path, int]:
    weights, version = current()
    return engine_weights(settings, weights, policy), version


def _at_version(current: CurrentWeights) -> str:
    return f" at version {current()[1]}"


async def _start_environments(
    settings: Settings,
    run_dir: Path,
    supervisor: TaskSupervisor,
    note: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
    provider: ProcessProvider,
) -> dict[str, str]:
    """Start the environment service, unless `env.urls` names some; returns a gateway's keys for them."""
    key = key_from_environment(ENV_KEY)
    urls = settings.env.urls
    if not urls:
        key = secrets.token_urlsafe(24)
        service = provider.environments(settings, run_dir, key)
        stack.push_async_callback(service.stop)
        urls = [await service.start()]
        supervisor.watch(supervise(service, note), service.name)
    return {"env_urls": "\n".join(urls), **({} if key is None else {"env_key": key})}


async def supervise(
    server: ServerProcess,
    note: Callable[[str], None],
    describe: Callable[[], str] = lambda: "",
    on_restart: Callable[[str, str], Awaitable[None]] | None = None,
) -> None:
    """Restart a server whenever it exits.

    Args:
        server: The server, which runs.
        note: Shows a line of text.
        describe: Called before each restart; returns what to add to the message that the server is back.
        on_restart: Called with the server's addresses before and after the restart.

    Raises:
        StartError: It has exited after MAX_RESTARTS restarts.
    """
    while True:
        why: str | None = await server.wait_for_exit()
        old_url, described = server.url, ""
        while why is not None:
            if server.restarts >= MAX_RESTARTS:
                raise StartError(f"{why}, after {server.restarts} restarts; {server.last_log_line()}")
            note(f"{why}; starting it again")
            described = describe()
            try:
                await server.restart()
                why = None
            except StartError as error:
                await asyncio.sleep(PAUSE_S)
                why = str(error)
        note(f"the {server.name} is back{described}")
        if on_restart is not None:
            await on_restart(old_url, server.url)


async def _connect_to_gateway(settings: Settings, stack: contextlib.AsyncExitStack) -> GatewayClient:
    """Return a client of the gateway at `gateway.url`. Raises StartError if none answers."""
    url = str(settings.gateway.url)
    client = GatewayClient(url, settings.gateway.admin_key or key_from_environment(ADMIN_KEY))
    stack.push_async_callback(client.close)
    try:
        await client.health()
        await client.list_groups()
    except GatewayError as error:
        how = "start it with tidegate gateway --journal DIR"
        raise StartError(f"gateway.url = {url}: {error}; {how}") from None
    return client


async def _supervise_gateway(
    gateway: ServerProcess, client: GatewayClient, note: Callable[[str], None]
) -> None:
    """Restart the gateway from its journal whenever it exits; raises StartError as `supervise`."""
    try:
        await supervise(gateway, note, lambda: ", with the sessions it had")
    except StartError as error:
        client.abort(str(error))  # pending calls need not wait: the run ends now
        raise


def admin_key(settings: Settings) -> str:
    """Return the setting's key or a random one.

    There always is one, because agents on the same machine can reach the control plane through loopback.
    """
    return settings.gateway.admin_key or secrets.token_urlsafe(24)


def worker_key(run_dir: Path) -> str:
    """Return the workers' key: the environment's, that of the run before its resume, or a random one.

    It is written to the run's directory, for workers on this machine.
    """
    file = run_dir / KEY_FILE
    key = key_from_environment(WORKER_KEY)  # the run's other processes do not inherit it
    if key is None and file.exists():
        return file.read_text(encoding="utf-8").strip()
    key = key or secrets.token_urlsafe(24)
    part = file.with_name(f".{KEY_FILE}.partial")
    # `touch` would keep the mode of a file that a killed process has left.
    part.unlink(missing_ok=True)
    # Before the key is in it: other users of the machine must not read it meanwhile.
    part.touch(0o600)
    part.write_text(key + "\n", encoding="utf-8")
    part.replace(file)
    return key
