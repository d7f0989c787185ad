"""The processes of a run's own agents: workers of its gateway, restarted when they exit."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tidegate.errors import ConfigError, GatewayError, StartError
from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY, GatewayClient
from tidegate.service.address import reachable_address
from tidegate.service.service import Service
from tidegate.settings.run import AgentSettings
from tidegate.trainer.processes.provider import GatewayAccess, ServerProcess

SECRET_VARIABLES = (ADMIN_KEY, WORKER_KEY)
CONCURRENCY = 1_000_000
"""Attempts of one process at a time: admission limits them."""
MAX_RESTARTS = 5
"""Limit on restarts in a row without an agent that returned in between."""
PAUSE_S = 1.0
CHECK_S, CHECKS = 10.0, 3
"""Interval of the checks that a process takes attempts, and failures in a row after which it is replaced."""


class AgentProcess(Service):
    """A process that runs agents (`tidegate worker`). Its `url` is the name under which it takes attempts."""

    listens = False

    def __init__(self, agent: AgentSettings, gateway: GatewayAccess, directory: Path, name: str) -> None:
        arguments = [f"--gateway={gateway.url}", f"--agent={agent.use}", f"--concurrency={CONCURRENCY}"]
        super().__init__("worker", lambda: arguments, directory, name=name)
        self.title = f"the agents' process ({name})"
        self._secrets = {"key": gateway.key, "options": agent.options}  # command lines are public

    async def start(self) -> str:
        """Start the process, again if it runs, and wait until it has loaded the agent.

        Raises ConfigError, StartError.
        """
        await self.stop()
        # A new name: the gateway ends the attempts of a process that exited by its name.
        self._secrets["name"] = f"{self.name}-{secrets.token_hex(4)}"
        return await super().start()

    def environment(self) -> dict[str, str]:
        # The user's agents run in this process: they must not read the keys.
        variables = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        local = f"127.0.0.1,localhost,::1,{reachable_address()}"
        for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach a gateway on this machine
            variables[name] = ",".join(filter(None, [variables.get(name), local]))
        return variables

    async def probe_url(self) -> str | None:
        if not self._announce.exists():
            return None
        announced: dict[str, str] = json.loads(self._announce.read_text())
        if "error" in announced:
            raise ConfigError(announced["error"])
        return announced["url"]


class Workers(Protocol):
    """What a supervisor needs of a gateway. Workers are given by name."""

    async def leave(self, worker: str) -> int:
        """End the attempts of a process that exited; returns how many of its agents had returned."""

    async def takes_attempts(self, worker: str) -> bool:
        """Return whether a process runs attempts or waits for some."""


class GatewayWorkers:
    """The workers of a gateway, which may be restarting.

    Args:
        gateway: Client with the admin key.
        workers: Client with the key of the trainer's own agents.
    """

    def __init__(self, gateway: GatewayClient, workers: GatewayClient) -> None:
        self._gateway = gateway
        self._workers = workers

    async def leave(self, worker: str) -> int:
        while True:
            try:
                return await self._workers.leave(worker)
            except GatewayError:  # the launcher restarts it, or ends the run
                await asyncio.sleep(PAUSE_S)

    async def takes_attempts(self, worker: str) -> bool:
        try:
            rows = (await self._gateway.attempts())["workers"]
        except GatewayError:
            # That the gateway is down says nothing about the process.
            return True
        return any(row["worker"] == worker and row["connected"] for row in rows)


async def supervise_agents(process: ServerProcess, workers: Workers, note: Callable[[str], None]) -> None:
    """Restart an agents' process whenever it exits or takes no attempts, as a stopped one.

    Args:
        process: The process, which runs.
        workers: Where it takes its attempts.
        note: Shows a line of text.

    Raises:
        StartError: It exited MAX_RESTARTS + 1 times in a row, and no agent returned in between.
    """
    failures = 0
    while True:
        why: str | None = await _until_lost(process, workers)
        failures = 0 if await workers.leave(process.url) else failures
        while why is not None:
            failures += 1
            if failures > MAX_RESTARTS:
                raise StartError(f"{why}, {failures} times in a row; {process.last_log_line()}")
            note(f"{why}; starting it again")
            try:
                await process.restart()
                why = None
            except StartError as error:
                why = str(error)
                await asyncio.sleep(PAUSE_S)


async def _until_lost(process: ServerProcess, workers: Workers) -> str:
    """Wait until a process has exited or takes no attempts; returns a message on it."""
    exited, failed = asyncio.ensure_future(process.wait_for_exit()), 0
    try:
        while failed < CHECKS:
            await asyncio.wait({exited}, timeout=CHECK_S)
            if exited.done():
                return exited.result()
            failed = 0 if await workers.takes_attempts(process.url) else failed + 1
        return f"the {process.name} takes no attempts"
    finally:
        exited.cancel()
