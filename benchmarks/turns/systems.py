"""Starts the systems under test as processes and measures them with the kernel's counters."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BENCHMARKS = Path(__file__).parents[1]
RLLM_PINS = Path(__file__).with_name("rllm.txt")
_START_S = 180.0  # importing torch takes up to a minute on a busy machine


@dataclass(frozen=True)
class System:
    """A server of chat completions: the process to measure, and the address of its sessions."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    path: str
    """Path of a session's calls; `{session}` stands for its name."""
    log: Path | None = None
    """Its log, if it is kept."""

    def cpu_seconds(self) -> float:
        """User and system time of the process and its children so far."""
        return sum(_cpu(pid) for pid in _family(self.process.pid))

    def rss_mb(self) -> float:
        return sum(_rss(pid) for pid in _family(self.process.pid)) / 2**20


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


def _cpu(pid: int) -> float:
    """CPU time from the process's CPU clock, which has a resolution of 1 ns; /proc/PID/stat has 10 ms."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"process {pid} has no CPU clock")
    return time.clock_gettime(clock.value)


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Loader:
    """The load generator's process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def turns(
        self,
        system: System,
        sessions: Sequence[tuple[str, str, str]],
        turns: int,
        *,
        concurrency: int | None = None,
        stream: bool = False,
    ) -> dict[str, Any]:
        """Runs turns in sessions of (name, path, key); `turns.load` describes the result."""
        job = {
            "kind": "turns",
            "url": system.url,
            "sessions": sessions,
            "turns": turns,
            "concurrency": concurrency or len(sessions),
            "stream": stream,
        }
        return self.ask(job)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Runs a job; returns its result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the load generator exited; its error is printed above")
        result: dict[str, Any] = json.loads(answer)
        return result


class Processes:
    """Starts and stops processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self) -> Loader:
        command = [sys.executable, "-m", "turns.load"]
        return Loader(self._start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def engine(self, replies: Path) -> System:
        command = [sys.executable, "-m", "turns.engine", str(replies)]
        return self._announced("engine", command, "/v1/chat/completions")

    def embedded(self, model: Path) -> System:
        """Starts the embedded engine on one thread."""
        command = [sys.executable, "-m", "tidegate", "engine", "--model.path", str(model), "--port", "0"]
        return self._announced("embedded", [*command, "--announce"], "")

    def bare(self, engine: System) -> System:
        command = [sys.executable, "-m", "turns.forwarder", engine.url]
        return self._announced("bare", command, "/s/{session}/v1/chat/completions")

    def tidegate(self, engine: System, model: Path) -> System:
        """Starts the gateway with its journal on disk. Its log is in the file `tidegate-N.log`."""
        command = [sys.executable, "-m", "tidegate", "gateway", "--model.path", str(model)]
        command += ["--journal", str(self._directory / f"journal-{next(self._numbers)}")]
        command += ["--engine.urls", engine.url, "--gateway.port=0", "--announce"]
        log = self._directory / f"tidegate-{next(self._numbers)}.log"
        return self._announced("tidegate", command, "/s/{session}/v1/chat/completions", log)

    def rllm(self, python: Path, engine: System, *, tuned: bool) -> System:
        """Starts the peer with its defaults; `tuned` keeps traces in memory and logs no calls."""
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        name = "rllm_tuned" if tuned else "rllm"
        database = self._directory / f"{name}.db"
        command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker", f"{engine.url}/v1"]
        command += ["--store", "memory", "--log-level", "warning"] if tuned else ["--db-path", str(database)]
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        system = System(
            name,
            f"http://127.0.0.1:{port}",
            self._start(command, stdout=log, stderr=log),
            "/sessions/{session}/v1/chat/completions",
        )
        until(lambda: _listens(port), system, "listen")
        return system

    def _announced(self, name: str, command: list[str], path: str, log: Path | None = None) -> System:
        announce = self._directory / f"{name}-{next(self._numbers)}.json"
        command = [*command, str(announce)]
        process = self._start(command, stderr=log and self._stack.enter_context(log.open("wb")))
        until(announce.exists, System(name, "", process, path, log), "announce its URL")
        return System(name, json.loads(announce.read_text())["url"], process, path, log)

    def _start(
        self,
        command: list[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, cwd=BENCHMARKS, stdin=stdin, stdout=stdout, stderr=stderr)
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def until(ready: Callable[[], bool], system: System, what: str) -> None:
    end = time.monotonic() + _START_S
    while not ready():
        if system.process.poll() is not None:
            log = system.log.read_text()[-1000:] if system.log is not None else ""
            raise RuntimeError(
                f"{system.name} ended with {system.process.returncode} before it could {what} {log}"
            )
        if time.monotonic() > end:
            raise RuntimeError(f"{system.name} did not {what} within {_START_S:g} s")
        time.sleep(0.05)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def rllm_python(directory: Path) -> Path:
    """The interpreter of the peer's virtual environment, which is created if missing.

    Raises RuntimeError with the failed command.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(RLLM_PINS)])
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
