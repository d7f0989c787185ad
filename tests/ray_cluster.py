"""A real Ray of two nodes on this machine, the second of which does not see where runs are."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEATS = [
    "--cluster.trainer={CPU = 0.2, near = 0.25}", "--cluster.gateway={CPU = 0.1}",
    "--cluster.engine={CPU = 0.2, far = 0.5}", "--cluster.agents={CPU = 0.1}", "--cluster.patience_s=30",
]  # fmt: skip
"""Two runs with two engines do not go beside each other: what one leaves reserved, the next one misses."""
START_S = 60.0
STOP_S = 40.0


@dataclass(frozen=True)
class RayCluster:
    """`near` and `far` are resources of its nodes, one of each."""

    port: int
    client_port: int
    runs: Path
    """A directory that the first node sees as we do, and the second empty."""
    environment: dict[str, str]
    pids: tuple[int, int]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client(self) -> str:
        return f"ray://127.0.0.1:{self.client_port}"

    def processes(self) -> dict[int, list[str]]:
        """The command lines of all that its nodes started, by pid."""
        found: dict[int, list[str]] = {}
        parents = {pid: parent for pid, parent, _ in _table()}
        for pid, _, command in _table():
            above = pid
            while above in parents and above not in self.pids:
                above = parents[above]
            if above in self.pids:
                found[pid] = command
        return found

    def tidegates(self) -> list[int]:
        """Those of runs: their servers, agents, ranks, and the actors that own them."""
        marks = ("tidegate", "Host", "ray::Head")
        return [
            pid for pid, command in self.processes().items() if any(one in " ".join(command) for one in marks)
        ]

    def owners(self, words: str) -> list[int]:
        """The pids of actors whose processes have these words in their command lines."""
        parents = {pid: parent for pid, parent, _ in _table()}
        return [parents[pid] for pid, command in self.processes().items() if words in " ".join(command)]


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Up when both nodes are; gone afterwards with all they started."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets want short paths
    runs = folder / "runs"
    runs.mkdir()
    port, client_port = _free_port(), _free_port()
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder),
    }  # fmt: skip
    start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    first = [
        *start, "--head", f"--port={port}", f"--ray-client-server-port={client_port}", "--num-cpus=2",
        "--include-dashboard=false", '--resources={"near": 1}', f"--temp-dir={folder}/ray",
    ]  # fmt: skip
    hidden = f'mount -t tmpfs none {runs} && exec "$@"'
    second = [
        "unshare", "-m", "sh", "-c", hidden, "sh", *start, f"--address=127.0.0.1:{port}", "--num-cpus=1",
        '--resources={"far": 1}',
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = _started(first, folder / "near.log", environment, stack)
        _until(head, folder / "near.log", lambda: _listens(client_port))
        other = _started(second, folder / "far.log", environment, stack)
        _until(other, folder / "far.log", lambda: "Ray runtime started" in (folder / "far.log").read_text())
        yield RayCluster(port, client_port, runs, environment, (head.pid, other.pid))


def may_hide() -> bool:
    """Whether this process may have a mount of its own."""
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.returncode == 0


def _started(
    command: list[str], log: Path, environment: dict[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(process: subprocess.Popen[bytes], log: Path, holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + START_S
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)  # polling another process


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _table() -> list[tuple[int, int, list[str]]]:
    """pid, parent's pid and command line of every process."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            command = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append((int(place.name), parent, command))
    return found
