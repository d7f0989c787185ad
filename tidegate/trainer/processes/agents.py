"""The processes of a run's own agents: workers of its gateway, restarted when they exit."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidegate.config import AgentSettings
from tidegate.errors import ConfigError, GatewayError, StartError
from tidegate.gateway.client import ADMIN_KEY, WORKER_KEY, GatewayClient
from tidegate.service.address import reachable_address
from tidegate.service.service import Service
from tidegate.trainer.processes.provider import GatewayAccess, ServerProcess

SECRET_VARIABLES = (ADMIN_KEY, WORKER_KEY)
CONCURRENCY = 1_000_000
"""Attempts of one process at a time: admission limits them."""
MAX_RESTARTS = 5
"""Limit on restarts in a row without an agent that returned in between."""
PAUSE_S = 1.0


class AgentProcess(Service):
    """A process that runs agents (`tidegate worker`). Its `url` is the name under which it takes attempts."""

    listens = False

    def __init__(self, agent: AgentSettings, gateway: GatewayAccess, directory: Path, name: str) -> None:
        arguments = [f"--gateway={gateway.url}", f"--agent={agent.use}", f"--concurrency={CONCURRENCY}"]
        super().__init__("worker", lambda: arguments, directory, name=name)
        self.title = f"the agents' process ({name})"
        self._secrets = {"key": gateway.key, "options": agent.options}  # command lines are public

    async def start(self) -> str:
        """Start the process and wait until it has loaded the agent. Raises ConfigError, StartError."""
        self._secrets["name"] = f"{self.name}-{secrets.token_hex(4)}"
        return await super().start()

    def environment(self) -> dict[str, str]:
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


async def supervise_agents(
    process: ServerProcess, leave: Callable[[str], Awaitable[int]], note: Callable[[str], None]
) -> None:
    """Restart an agents' process whenever it exits.

    Args:
        process: The process, which runs.
        leave: Ends, by the process's name, the attempts that it ran; returns how many of its agents returned.
        note: Shows a line of text.

    Raises:
        StartError: It exited MAX_RESTARTS + 1 times in a row, and no agent returned in between.
    """
    failures = 0
    while True:
        why: str | None = await process.wait_for_exit()
        failures = 0 if await leave(process.url) else failures
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


async def leave(gateway: GatewayClient, worker: str) -> int:
    """End the attempts of a process that exited, as soon as the gateway responds."""
    while True:
        try:
            return await gateway.leave(worker)
        except GatewayError:  # the launcher restarts it, or ends the run
            await asyncio.sleep(PAUSE_S)
