"""Waits for conditions that have no event."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


async def eventually(wanted: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Polls until `wanted` returns a true value."""
    async with asyncio.timeout(timeout_s):
        while not wanted():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


def announced(file: Path, process: subprocess.Popen[Any] | None = None, timeout_s: float = 60.0) -> str:
    """The URL that a server writes once it serves; fails if it has a process that ends before."""
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if process is not None:
            assert process.poll() is None, f"{process.args} ended with status {process.returncode}"
        assert time.monotonic() < deadline, f"{file} is not there after {timeout_s:g} s"
        time.sleep(0.02)
    return str(json.loads(file.read_text())["url"])
