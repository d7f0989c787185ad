"""A real Ray cluster with several nodes on this machine. All nodes except the first have a separate network,
like separate machines, and cannot access the directory of the runs."""

from __future__ import annotations

import contextlib
import itertools
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
    "--cluster.engine={CPU = 0.2, far = 0.5}", "--cluster.agents={CPU = 0.1}", "--cluster.env={CPU = 0.1}",
    "--cluster.timeout_s=30",
]  # fmt: skip
"""Resources such that two runs do not fit at once: a reservation left behind blocks the next run."""
START = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
Table = list[tuple[int, int, list[str]]]
START_S = 60.0
STOP_S = 40.0


@dataclass(frozen=True)
class RayCluster:
    """The first node has the resource `near`; each other node has `far` and a fake GPU."""

    network: Network
    port: int
    client_port: int
    folder: Path
    environment: dict[str, str]
    pids: list[int]
    """Pids of the nodes."""
    numbers: Iterator[int]
    """Numbers for nodes that join."""
    stack: contextlib.ExitStack

    @property
    def address(self) -> str:
        return f"{self.network.address(1)}:{self.port}"

    @property
    def client(self) -> str:
        return f"ray://{self.network.address(1)}:{self.client_port}"

    @property
    def runs(self) -> Path:
        """A directory that the first node shares with the test; the other nodes see it empty."""
        return self.folder / "runs"

    def join(self) -> None:
        """Adds a `far` node, as the last of `pids`."""
        number = next(self.numbers)
        log = self.folder / f"far{number}.log"
        apart = f"""
            set -e
            mount -t tmpfs none {self.runs}
            mount -t tmpfs none {self.folder}/ray
            echo apart
            read _ || exec "$@"
        """
        command = [
            "unshare", "-m", "-n", "sh", "-c", apart, "sh", *START,
            f"--address={self.address}", f"--node-ip-address={self.network.address(number)}", "--num-cpus=1",
            "--num-gpus=1", '--resources={"far": 1}',
        ]  # fmt: skip
        node = _started(command, log, self.environment, self.stack)
        _until(node, log, lambda: "apart" in log.read_text())
        self.network.link(number, node.pid)
        assert node.stdin is not None
        node.stdin.close()  # lets the node start
        _until(node, log, lambda: "Ray runtime started" in log.read_text())
        self.pids.append(node.pid)

    def lose(self, node: int) -> None:
        """Kills a node and all of its processes at once, like a machine failure."""
        above = self.pids.pop(node)
        os.kill(above, signal.SIGSTOP)  # so that it starts no more processes
        for pid in _below({above}, _table()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> dict[int, list[str]]:
        """Command lines of all processes started by the nodes, by pid."""
        table = _table()
        mine = _below(set(self.pids), table)
        return {pid: command for pid, _, command in table if pid in mine}

    def tidegates(self) -> list[int]:
        """Pids of the processes of runs: servers, agents, ranks, and the actors that own them."""
        marks = ("tidegate", "ServerActor", "RankActor", "ray::RunActor", "sglang")
        return [
            pid for pid, command in self.processes().items() if any(one in " ".join(command) for one in marks)
        ]

    def command(self, words: str) -> list[str]:
        """The command line of the one process whose command line contains `words`."""
        return self.processes()[self.pid(words)]

    def pid(self, words: str) -> int:
        """The pid of the one process whose command line contains `words`."""
        (found,) = (
            pid
            for pid, command in self.processes().items()
            # The watcher of an external server has the server's command line after its own.
            if words in " ".join(command) and "tidegate.service.parent_death" not in command
        )
        return found

    def doors(self) -> set[tuple[str, int]]:
        """The addresses, other than loopback, on which processes of runs listen."""
        own, found = os.readlink("/proc/self/ns/net"), set()
        for pid in self.tidegates():
            is_near = os.readlink(f"/proc/{pid}/ns/net") == own
            found |= _listening(pid, self.network.address(1 if is_near else 2))
        return found

    def owners(self, words: str) -> list[int]:
        """Pids of the actors whose processes' command lines contain `words`."""
        table = _table()
        mine = _below(set(self.pids), table)
        return [parent for pid, parent, command in table if pid in mine and words in " ".join(command)]


def _listening(pid: int, node: str) -> set[tuple[str, int]]:
    """The addresses other than loopback on which a process of a node listens, in its own network."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] != "0A" or f"socket:[{fields[9]}]" not in inodes:
                continue
            if not address.strip("0"):  # on all addresses
                found.add((node, int(port, 16)))
            elif name == "tcp" and not (host := socket.inet_ntoa(bytes.fromhex(address)[::-1])).startswith(
                "127."
            ):
                found.add((host, int(port, 16)))
    return found


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Runs a cluster of two nodes; kills the nodes and all of their processes afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need short paths
    for name in ("runs", "ray"):
        (folder / name).mkdir()
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(folder), "RAY_health_check_period_ms": "1000",  # five checks may fail
        "RAY_worker_niceness": "0",  # at its default of 15, other tests leave a run almost no CPU time
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        network = stack.enter_context(_network())
        cluster = RayCluster(
            network, _free_port(), _free_port(), folder, environment, [], itertools.count(2), stack
        )
        command = [
            *START, "--head", f"--port={cluster.port}", f"--ray-client-server-port={cluster.client_port}",
            f"--node-ip-address={network.address(1)}", "--num-cpus=2", "--include-dashboard=false",
            '--resources={"near": 1}', f"--temp-dir={folder}/ray",
        ]  # fmt: skip
        head = _started(command, folder / "near.log", environment, stack)
        _until(head, folder / "near.log", lambda: _listens(network.address(1), cluster.client_port))
        cluster.pids.append(head.pid)
        cluster.join()
        yield cluster


def nothing_left(cluster: RayCluster, run: str) -> bool:
    """Waits until no process and no actor directory is left; `tests.ray_faults` checks reservations."""
    deadline = time.monotonic() + 30

    def left() -> list[object]:
        return [*cluster.tidegates(), *cluster.runs.parent.glob(f"tidegate-{run}-*")]

    while left() and time.monotonic() < deadline:
        time.sleep(0.1)  # polling other processes
    assert left() == [], cluster.processes()
    return True


def may_hide() -> bool:
    """Whether this process may create mount and network namespaces."""
    trial = "ip link add tidegate0 type bridge && ip link add tidegate1 type veth peer name tidegate2"
    try:
        done = subprocess.run(["unshare", "-m", "-n", "sh", "-c", trial], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@dataclass(frozen=True)
class Network:
    """A bridge that connects the nodes; its own address is number 1."""

    name: str
    subnet: str

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}"

    def link(self, number: int, pid: int) -> None:
        """Connects the network namespace of a process."""
        near, far = f"{self.name}-{number}", f"{self.name}n{number}"
        _ip("link", "add", near, "master", self.name, "type", "veth", "peer", "name", far, "netns", str(pid))
        _ip("link", "set", near, "up")
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        for words in (
            ["addr", "add", f"{self.address(number)}/24", "dev", far], ["link", "set", far, "up"],
            ["link", "set", "lo", "up"],
        ):  # fmt: skip
            subprocess.run([*inside, *words], check=True, capture_output=True)


@contextlib.contextmanager
def _network() -> Iterator[Network]:
    one, other, *rest = secrets.token_bytes(5)
    network = Network(f"tg{bytes(rest).hex()}", f"10.{one}.{other}")
    _ip("link", "add", network.name, "type", "bridge")
    try:
        _ip("addr", "add", f"{network.address(1)}/24", "dev", network.name)
        _ip("link", "set", network.name, "up")
        yield network
    finally:
        _ip("link", "del", network.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _started(
    command: list[str], log: Path, environment: dict[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
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


def _listens(address: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _below(pids: set[int], table: Table) -> set[int]:
    """Processes and their descendants."""
    found = set(pids)
    while more := {pid for pid, parent, _ in table if parent in found} - found:
        found |= more
    return found


def _table() -> Table:
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
