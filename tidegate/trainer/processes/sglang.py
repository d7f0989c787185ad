"""SGLang servers that a run starts and owns, from an environment of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tidegate.config import EngineSettings
from tidegate.service.external import ExternalService
from tidegate.service.serve import write_whole
from tidegate.service.service import LOOPBACK
from tidegate.trainer.processes.provider import Live


class SGLangServer(ExternalService):
    """`python -m sglang.launch_server` with what is live. Its `/health` is no 200 until its own first request
    went through it."""

    def __init__(
        self,
        settings: EngineSettings,
        live: Live,
        directory: Path,
        name: str,
        index: int,
        address: str = LOOPBACK,
    ) -> None:
        super().__init__(directory, name, address=address)
        self._settings = settings
        self._live = live
        self._index = index

    async def start(self) -> str:
        url = await super().start()
        await asyncio.to_thread(write_whole, self._announce, json.dumps({"url": url, "pid": self.pid}))
        return url

    def program(self, port: int) -> list[str]:
        weights, version = self._live()
        return [
            str(self._settings.python), "-m", "sglang.launch_server", "--model-path", str(weights),
            "--host", self.address, "--port", str(port), "--weight-version", str(version),
            *self._settings.numbered(self._index),
        ]  # fmt: skip
