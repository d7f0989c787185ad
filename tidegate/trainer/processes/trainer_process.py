"""The trainer of a standing service, a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tidegate.errors import ConfigError
from tidegate.gateway.client import ADMIN_KEY
from tidegate.service.api_key import ENGINE_KEY, engine_key
from tidegate.service.directory_lock import INHERITED, DirectoryLock
from tidegate.service.process import OwnedProcess
from tidegate.service.serve import write_atomically

STOP_S = 300.0
"""Time limit of its last step and checkpoint."""


class TrainerProcess(OwnedProcess):
    """`tidegate train` with the settings of a file; its output is that of this process.

    Args:
        settings: Path of its settings.
        run_dir: Its run directory; a run in it is resumed.
        lock: Lock of the directory, which the trainer shares.
        key: Admin key of the gateway.
    """

    name = "trainer"

    def __init__(self, settings: Path, run_dir: Path, key: str, lock: DirectoryLock) -> None:
        super().__init__("the trainer", None)
        self._settings = settings
        self._run_dir = run_dir
        self._key = key
        self._lock = lock

    async def start(self) -> None:
        """Starts it; it exits when this process exits."""
        tie = [sys.executable, "-P", "-m", "tidegate.service.parent_death", str(os.getpid())]
        train = [sys.executable, "-P", "-m", "tidegate", "train", str(self._settings), "--resume", "auto"]
        fd = self._lock.fd
        variables = {**os.environ, ADMIN_KEY: self._key, ENGINE_KEY: engine_key(), INHERITED: str(fd)}
        await self._spawn([*tie, *train], env=variables, pass_fds=[fd])
        place = self._run_dir / "logs" / f"{self.name}.address"
        await asyncio.to_thread(write_atomically, place, json.dumps({"pid": self.pid}))

    async def restart(self) -> None:
        await self.start()

    async def wait_for_exit(self) -> str:
        """Waits for its exit; raises ConfigError if it refused its settings, as a restart would not help."""
        how = await super().wait_for_exit()
        if self._code == ConfigError.exit_code:
            raise ConfigError(f"{how}: its settings were refused, see above ({self._settings})")
        return how

    def finished(self) -> bool:
        """Whether it has taken all its steps."""
        return self._code == 0

    @property
    def _code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def stop(self) -> None:
        self.signal(signal.SIGTERM)
        await self._join(STOP_S)
