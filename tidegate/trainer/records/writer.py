"""Writes to a run's files, in a thread: a slow file system does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from tidegate.trainer.waits import run_to_completion

T = TypeVar("T")


class FileWriter:
    """Runs writes one after another, in the order of the calls, in one thread.

    Each caller waits for its write, so that what follows it (a ledger entry, the next step) never precedes
    it, and receives its error. The encoding of the lines is part of a write.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")

    async def run(self, write: Callable[..., T], *arguments: object) -> T:
        """Return `write(*arguments)`, called after all earlier writes.

        A write is never abandoned: if the caller is cancelled, it is cancelled once the write is complete,
        or receives the write's error.
        """
        return await run_to_completion(asyncio.wrap_future(self._thread.submit(write, *arguments)))

    async def close(self) -> None:
        """Wait for the writes that were called; later calls raise RuntimeError."""
        await run_to_completion(asyncio.to_thread(self._thread.shutdown))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
