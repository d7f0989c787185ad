"""SGLang servers owned by a run, in a Python environment of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tidegate.config import EngineSettings
from tidegate.service.external import ExternalService
from tidegate.service.serve import write_atomically
from tidegate.service.service import LOOPBACK
from tidegate.trainer.processes.provider import CurrentWeights


class SGLangServer(ExternalService):
    """Runs `python -m sglang.launch_server` with the current weights.

    Its `/health` returns 200 only after its own warm-up request.
    """

    def __init__(
        self,
        settings: EngineSettings,
        current: CurrentWeights,
        directory: Path,
        name: str,
        index: int,
        address: str = LOOPBACK,
    ) -> None:
        super().__init__(directory, name, address=address)
        self._settings = settings
        self._current = current
        self._index = index

    async def start(self) -> str:
        url = await super().start()
        await asyncio.to_thread(write_atomically, self._announce, json.dumps({"url": url, "pid": self.pid}))
        return url

    def program(self, port: int) -> list[str]:
        weights, version = self._current()
        return [
            str(self._settings.python), "-m", "sglang.launch_server", "--model-path", str(weights),
            "--host", self.address, "--port", str(port), "--weight-version", str(version),
            *self._settings.numbered(self._index),
        ]  # fmt: skip
