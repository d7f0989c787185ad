"""Keeps sandboxes that are already started, so that taking one is cheap."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from tidegate.errors import ConfigError, SandboxError
from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.opening import open_sandbox
from tidegate.sandbox.owned import remove_orphans
from tidegate.sandbox.sandbox import Sandbox
from tidegate.service.backoff import back_off

log = logging.getLogger("tidegate.sandbox")

FIRST_S, LONGEST_S = 0.5, 30.0
"""Delays after a sandbox could not be started."""


class SandboxPool:
    """Started sandboxes of one kind: `async with SandboxPool() as pool`, `async with pool.take() as box`.

    A sandbox is used once: it is closed after use, and another one is started. A pool limits how many
    sandboxes wait, not how many are in use.

    Args:
        limits: Limits of each sandbox.
        size: Number of sandboxes that wait; each has about 15 MB of memory.
        backend, read_only, image: See `open_sandbox`.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        size: int = 8,
        backend: str = "bubblewrap",
        *,
        read_only: Sequence[str] = (),
        image: str | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"the size {size} of a sandbox pool must be at least 1")
        self.limits = limits or SandboxLimits()
        self.size = size
        self._backend, self._read_only, self._image = backend, list(read_only), image
        self._warm: deque[Sandbox] = deque()
        self._changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Starts the first sandbox, and the others in the background; raises SandboxError if it cannot."""
        await asyncio.to_thread(remove_orphans)
        self._warm.append(await self._open())
        self._filling = asyncio.create_task(self._fill())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def take(self, files: Mapping[str, bytes | str] | None = None) -> AsyncIterator[Sandbox]:
        """Gives the caller a fresh sandbox, and closes it afterwards.

        Args:
            files: Files to write first, as path → content.

        Raises:
            SandboxError: No sandbox can be started, or the pool is not open.
            OSError: A file cannot be written.
        """
        if self._filling is None:
            raise SandboxError("the sandbox pool is not open: use `async with pool`")
        box = self._next() or await self._open()
        try:
            if files:
                await box.add_files(files)
            yield box
        finally:
            await box.close()

    async def close(self) -> None:
        """Closes the sandboxes that wait; those in use are closed by their users."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
            self._filling = None
        while self._warm:
            await self._warm.popleft().close()

    @property
    def waiting(self) -> int:
        """Number of sandboxes that can be taken at once."""
        return len(self._warm)

    def _next(self) -> Sandbox | None:
        self._changed.set()
        while self._warm:
            box = self._warm.popleft()
            if not box.closed:
                return box
        return None

    async def _open(self) -> Sandbox:
        return await open_sandbox(self.limits, self._backend, read_only=self._read_only, image=self._image)

    async def _fill(self) -> None:
        failures = 0
        while True:
            if len(self._warm) >= self.size:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                self._warm.append(await self._open())
                failures = 0
            except (SandboxError, OSError) as error:
                log.warning("the sandbox pool cannot start a sandbox: %s", error)
                failures = await back_off(failures, FIRST_S, LONGEST_S)
