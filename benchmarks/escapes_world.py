"""Targets on the host that attempts to escape look for: files, servers, sockets, processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from escapes import PRELUDE, Attempt

from tidegate.sandbox.inside import job

SHM_REMOVE = 0
SLEEP = "import time; time.sleep(600)"


@dataclass(frozen=True)
class Secret:
    """An environment variable of this process."""

    name: str
    value: str


SECRET = Secret("TIDEGATE_BENCHMARK_SECRET", secrets.token_hex(16))


class _Answers(BaseHTTPRequestHandler):
    """Returns the secret for every path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = SECRET.value.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class Targets:
    """The targets, as long as the context is open; `world` describes them to the attempts."""

    def __enter__(self) -> Targets:
        self._stack = contextlib.ExitStack()
        name, folder = secrets.token_hex(4), Path(tempfile.mkdtemp(prefix="tidegate-targets-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        file, shm = folder / "secret", Path(f"/dev/shm/tidegate-{name}")
        for path in (file, shm):
            path.write_text(SECRET.value)
        self._stack.callback(shm.unlink, missing_ok=True)
        self.descriptor = os.open(file, os.O_RDONLY)
        os.set_inheritable(self.descriptor, True)
        self._stack.callback(os.close, self.descriptor)
        self.world: dict[str, Any] = {
            "token": SECRET.value, "secret_name": SECRET.name, "file": str(file), "shm": str(shm),
            "url": f"http://127.0.0.1:{self._serve(ThreadingHTTPServer, '127.0.0.1')}",
            "url6": f"http://[::1]:{self._serve(_Server6, '::1')}",
            "address": f"http://127.0.0.2:{self._serve(ThreadingHTTPServer, '127.0.0.2')}",
            "udp": self._datagrams(), "abstract": f"tidegate-{name}", "socket": str(folder / "socket"),
            "code": job.__file__, "cgroup": _cgroup(name), "shm_key": self._segment(),
            "marker": f"victim-{name}", "other_marker": f"other-{name}", "survivor": f"survivor-{name}",
            "other_file": f"other-{name}", "planted": str(folder / "planted"),
            "scratch": str(folder / "scratch"),
        }  # fmt: skip
        self._stream("\0" + self.world["abstract"])
        self._stream(self.world["socket"])
        self.session_url = f"{self.world['url']}/s/mine/v1"
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def victim(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the host."""
        process = subprocess.Popen([sys.executable, "-c", SLEEP, self.world["marker"]])
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pid in marked(self.world["survivor"]):
                os.kill(pid, 9)

    def clear(self) -> None:
        """Removes what a successful attempt has written."""
        Path(self.world["planted"]).unlink(missing_ok=True)
        shutil.rmtree(self.world["scratch"], ignore_errors=True)

    def _serve(self, server: type[ThreadingHTTPServer], host: str) -> int:
        serving = server((host, 0), _Answers)
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        self._stack.callback(serving.server_close)
        self._stack.callback(serving.shutdown)
        return int(serving.server_address[1])

    def _datagrams(self) -> int:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 0))

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    _, sender = server.recvfrom(1000)
                    server.sendto(SECRET.value.encode(), sender)

        threading.Thread(target=answer, daemon=True).start()
        self._stack.callback(server.close)
        return int(server.getsockname()[1])

    def _stream(self, name: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(name)
        server.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(SECRET.value.encode())

        threading.Thread(target=answer, daemon=True).start()
        self._stack.callback(server.close)

    def _segment(self) -> int:
        """Makes a System V segment; returns its key."""
        libc, key = ctypes.CDLL(None, use_errno=True), secrets.randbelow(1 << 30) + 1
        number = libc.shmget(key, 4096, 0o1666)
        libc.shmat.restype = ctypes.c_void_p
        ctypes.memmove(libc.shmat(number, None, 0), SECRET.value.encode(), len(SECRET.value))
        self._stack.callback(libc.shmctl, number, SHM_REMOVE, None)
        return key


def attempted(attempt: Attempt, world: dict[str, Any]) -> str:
    """The attempt's whole program. An exception is a refusal."""
    place = f"import os; os.environ['WORLD'] = {json.dumps(world)!r}\n"
    return f"{place}{PRELUDE}\ntry:\n    exec({attempt.program!r})\nexcept OSError as error: print(error)\n"


def marked(marker: str, *, within_s: float = 0.0, gone_within_s: float = 0.0) -> list[int]:
    """Processes with this word in their command line.

    Waits until there is one (`within_s`), or until there is none (`gone_within_s`).
    """
    until = time.monotonic() + max(within_s, gone_within_s)
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        if bool(found) == bool(within_s) or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _cgroup(name: str) -> str:
    """A control group that root may make."""
    root = Path("/sys/fs/cgroup")
    places = [root, root / "memory", root / "unified"]
    return str(next((one for one in places if (one / "cgroup.procs").exists()), root) / f"tidegate-{name}")
