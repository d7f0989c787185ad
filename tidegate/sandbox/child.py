"""The process of a sandbox, on the owner's side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

MESSAGE_BYTES = 4_096


class SandboxProcess:
    """A child process in a session of its own.

    It is started within one call. A start by asyncio could be cancelled half-way, which kills bwrap alone and
    leaves a child of it that waits without end; a session is killed with all its processes.

    Args:
        command: The program and its arguments.
        stdin: Descriptor of its standard input.
        options: Others of `subprocess.Popen`.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(self, command: Sequence[str], stdin: int, **options: Any) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **options,
        )
        self._exit = os.pidfd_open(self._process.pid)

    def kill(self) -> None:
        """Kills its session, unless it was waited for."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, grace_s: float) -> str:
        """Waits for the exit; kills the process after `grace_s`. Returns its errors, or its exit code."""
        assert self._process.stderr is not None
        if self._process.returncode is None:
            try:
                async with asyncio.timeout(grace_s):
                    await readable(self._exit)
            except TimeoutError:
                self.kill()
                await readable(self._exit)
            self._process.wait()
            os.close(self._exit)
        with self._process.stderr as stream:
            os.set_blocking(stream.fileno(), False)
            errors = stream.read(MESSAGE_BYTES) or b""
        return errors.decode("utf-8", "replace").strip() or f"exit code {self._process.returncode}"


async def readable(descriptor: int) -> None:
    """Waits until something can be read."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
