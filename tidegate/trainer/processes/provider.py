"""Interfaces of the processes of a run, and of their provider: this machine or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tidegate.config import Settings
from tidegate.trainer.processes.rank_process import RankProcess

CurrentWeights = Callable[[], tuple[Path, int]]
"""Returns the weights that engines should serve now, and their version."""


GatewayKeys = Mapping[str, str]
"""The `admin_key` of a gateway; its `worker_key`, if workers take attempts; and the `env_key` of its
environment services, with their addresses in `env_urls`, one per line."""


class GatewayAccess(NamedTuple):
    """Address of a gateway, and the key with which the trainer's own agents take attempts."""

    url: str
    key: str


class ServerProcess(Protocol):
    """An engine, a gateway, an environment service or an agents' process: a `Service`, or a `RemoteServer` on
    another node."""

    name: str
    url: str
    restarts: int

    async def start(self) -> str: ...
    async def wait_for_exit(self) -> str: ...
    async def restart(self) -> None: ...
    async def stop(self) -> None: ...
    def last_log_line(self) -> str: ...


class ProcessProvider(Protocol):
    """Creates the processes of a run without starting them; each method is called once."""

    host: str
    """Address of this process as the others reach it."""
    delivers_in_place: bool
    """Whether engines read weights where the trainer wrote them, so that a difference finds its base."""

    def engines(
        self, settings: Settings, run_dir: Path, current: CurrentWeights, policy: str = ""
    ) -> Sequence[ServerProcess]:
        """Return the run's own engines, of several policies those of one; none if `engine.urls` is set.

        `settings` are those of the whole run, all of whose engines have different GPUs.
        """

    def teachers(self, settings: Settings, run_dir: Path) -> Mapping[str, ServerProcess]:
        """Return the engines of the teachers that are given by `path`, by environment."""

    def environments(self, settings: Settings, run_dir: Path, key: str) -> ServerProcess:
        """Return the environment service with its key."""

    def gateway(
        self, settings: Settings, run_dir: Path, keys: GatewayKeys, journal: Path | None
    ) -> ServerProcess:
        """Return the gateway with its keys; a `journal` keeps its sessions across restarts."""

    def agents(self, settings: Settings, run_dir: Path, gateway: GatewayAccess) -> Sequence[ServerProcess]:
        """Return the processes that run the run's own agents, as workers of a gateway that runs."""

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[RankProcess]: ...

    async def deliver(self, url: str, weights: Path) -> Path:
        """Deliver weights to the engine at `url`; returns their path there. Raises StartError, OSError."""
