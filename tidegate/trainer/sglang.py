"""SGLang servers that a run starts and owns, from an environment of their own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp

from tidegate.config import EngineSettings
from tidegate.serve import write_whole
from tidegate.services import Service

READY_S = 1800.0
"""Large weights, and CUDA graphs to capture."""
POLL_S = 0.5
ANSWER_S = 5.0

Live = Callable[[], tuple[Path, int]]
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class SGLangServer(Service):
    """`python -m sglang.launch_server` with what is live. It ends with the run, also when that is killed."""

    ready_s = READY_S
    poll_s = POLL_S

    def __init__(self, settings: EngineSettings, live: Live, directory: Path, name: str, index: int) -> None:
        super().__init__("engine", list, directory, name=name)
        self._settings = settings
        self._live = live
        self._index = index

    async def start(self) -> str:
        url = await super().start()
        await asyncio.to_thread(write_whole, self._announce, json.dumps({"url": url, "pid": self.pid}))
        return url

    def command(self) -> list[str]:
        self._port = self._port or free_port()
        weights, version = self._live()
        arguments = [one.replace("{index}", str(self._index)) for one in self._settings.arguments]
        return [
            sys.executable, "-m", "tidegate.tether", str(os.getpid()),
            str(self._settings.python), "-m", "sglang.launch_server", "--model-path", str(weights),
            "--host", "127.0.0.1", "--port", str(self._port), "--weight-version", str(version), *arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """This process's, less what would lead another interpreter to this one's packages."""
        return {key: value for key, value in os.environ.items() if key not in NOT_THEIRS}

    async def where(self) -> str | None:
        """Its URL, once its own first request went through it (until then `/health` is no 200)."""
        url = f"http://127.0.0.1:{self._port}"
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url + "/health") as answer:
                return url if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
