"""An environment service that a gateway without a run starts for itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import StartError
from tidegate.gateway.environments.client import EnvironmentClient
from tidegate.service.backoff import back_off
from tidegate.service.service import LOOPBACK, Service

log = logging.getLogger("tidegate.gateway.environments.process")
FIRST_S, LONGEST_S = 0.1, 30.0


class OwnedEnvironments(EnvironmentClient):
    """A client with a service of its own, `tidegate env serve`, which is started again when it exits.

    Args:
        arguments: Arguments of the service.
        environment: What is passed to it as secrets: the environment's `options`, and others.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, Any]) -> None:
        key = secrets.token_urlsafe(24)
        super().__init__([], key)
        self._directory = tempfile.TemporaryDirectory(prefix="tidegate-env-")
        self._service = Service(
            "env",
            lambda: ["serve", *arguments],
            Path(self._directory.name),
            secrets={"key": key, **environment},
            shares_log=True,
            host=LOOPBACK,
        )
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the service; a second call has no effect. Raises StartError."""
        if self._keeping is not None:  # a second service would serve at the same socket, with other states
            return
        self._urls = [await self._service.start()]
        self._keeping = asyncio.create_task(self._keep(), name="environment service")
        await super().start()

    async def _keep(self) -> None:
        while True:
            why: str | None = await self._service.wait_for_exit()
            failures = 0
            while why is not None:
                log.error("%s; starting it again", why)
                failures = await back_off(failures, FIRST_S, LONGEST_S)
                try:
                    await self._service.restart()
                    why = None
                except (StartError, OSError) as error:
                    why = str(error)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        await self._service.stop()
        await asyncio.to_thread(self._directory.cleanup)
        await super().close()
