"""Where the processes of a run come from: this machine, or what else can give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tidegate.config import Settings
from tidegate.trainer.processes.agent_pool import AgentRunner
from tidegate.trainer.processes.rank_process import RankProcess

Live = Callable[[], tuple[Path, int]]
"""The weights that engines should serve at this moment, and their version."""


class ServerProcess(Protocol):
    """An engine or a gateway as its owner sees it: `services.Service`, or one on another node."""

    name: str
    url: str
    restarts: int

    async def start(self) -> str: ...
    async def died(self) -> str: ...
    async def restart(self) -> None: ...
    async def stop(self) -> None: ...
    def last_words(self) -> str: ...


class ProcessProvider(Protocol):
    """Makes the processes of a run, not started; each method is called once."""

    host: str
    """This process's address, as the others reach it."""

    def engines(self, settings: Settings, run_dir: Path, live: Live) -> Sequence[ServerProcess]:
        """The run's own engines: none where `engine.urls` names others."""

    def gateway(self, settings: Settings, run_dir: Path, key: str, journal: Path | None) -> ServerProcess:
        """The gateway, whose admin key is `key`. Its address stays; with a `journal` its sessions do, too."""

    def agents(self, settings: Settings, run_dir: Path) -> Sequence[AgentRunner]:
        """The processes of agents."""

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[RankProcess]:
        """The trainer's ranks but the first."""

    async def place(self, url: str, weights: Path) -> Path:
        """Where the engine at a URL finds the weights of a directory here. Raises StartError, OSError."""
