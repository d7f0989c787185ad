"""Samples the stacks of a process with py-spy, and attributes them to the parts of a turn."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns.systems import System

_RATE = 400
_START_S = 2.0
_PARTS = (
    ("engine call: HTTP", ("/service/http1/", "engines/client.py", "/aiohttp/")),
    ("journal", ("/gateway/journal/",)),
    ("encoding", ("rendering/tokenizer.py",)),
    ("reply: decoding, tool calls, stop strings", ("/gateway/parsing/",)),
    ("rendering", ("/gateway/rendering/",)),
    ("history and tree", ("sessions/tree.py", "sessions/history.py")),
    ("engine pool and protocol", ("/gateway/engines/",)),
    ("dialect", ("/gateway/dialects/",)),
    ("response", ("http/response.py",)),
    (
        "request: body, digest, session",
        ("http/endpoints.py", "turns/request_reader.py", "request_body.py", "request.py", "body_prefixes.py"),
    ),
    ("pipeline", ("/gateway/turns/", "/gateway/sessions/", "/gateway/sampling.py")),
    ("HTTP server, ASGI and routing", ("/uvicorn/", "/starlette/", "/service/direct/", "http/app.py")),
)
"""Parts and their files; the innermost matching frame of a stack decides."""
_LOOP = "event loop"
_WAITING = ("_worker (", "Writer._next_batch (")
"""Innermost functions of threads that wait for work, which py-spy does not recognise everywhere."""


def breakdown(
    stacks: Path, system: System, work: Callable[[], dict[str, Any]], rounds: int
) -> list[dict[str, Any]]:
    """Runs `work` several times; returns each part's share of the process's CPU time and its ms per turn.

    Args:
        stacks: File that py-spy writes.
        system: The process.
        work: Runs turns; returns their `cpu_ms`.
        rounds: Number of runs, after one to warm up.

    Raises:
        RuntimeError: py-spy is missing or fails.
    """
    command = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if command is None:
        raise RuntimeError("py-spy is missing; install it with: pip install py-spy")
    work()
    options = ["--rate", str(_RATE), "--format", "raw", "--full-filenames", "--duration", "3600"]
    arguments = [command, "record", "--pid", str(system.process.pid), "--output", str(stacks), *options]
    spy = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(_START_S)
    costs = [work()["cpu_ms"] for _ in range(rounds)]
    spy.send_signal(signal.SIGINT)
    _, error = spy.communicate(timeout=60)
    if not stacks.exists():
        raise RuntimeError(f"py-spy failed: {error.decode()[-500:]}")
    shares = _shares(stacks.read_text())
    mean = sum(costs) / len(costs)
    rows = [{"part": part, "share": share, "cpu_ms": share * mean} for part, share in shares.items()]
    return [*rows, {"part": "a turn", "share": 1.0, "cpu_ms": mean}]


def _shares(text: str) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not frames[-1].startswith(_WAITING):
            counts[_part(frames)] += int(count)
    return {part: count / counts.total() for part, count in counts.most_common()}


def _part(frames: list[str]) -> str:
    for frame in reversed(frames):
        for part, files in _PARTS:
            if any(file in frame for file in files):
                return part
    return _LOOP
