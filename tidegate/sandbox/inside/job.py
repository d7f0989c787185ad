"""A command, or an operation on files, that runs as a child process of the supervisor."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

from tidegate.sandbox.inside.frames import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NO_COMMAND = 127
"""Exit code of a command that cannot be started, as in a shell."""
FLOOD = 64 << 20
"""Bytes of output after which a command is killed; output beyond `output_bytes` is discarded."""


class Job:
    """A running child process with its pipes.

    Args:
        number: Its id in the owner's requests.
        pid: Its process id.
        stdin: Pipe of its input.
        outputs: Open pipe → 1 (output) or 2 (errors).
        pending: Input that is not yet written.
        keep: Bytes kept of each output.
        deadline: Monotonic time at which it is killed.
        freezes: The other processes are stopped while it runs.
    """

    # No dataclass: importing the module takes a quarter of a sandbox's start.
    def __init__(
        self, number: int, pid: int, stdin: int, outputs: dict[int, int], pending: memoryview, keep: int,
        deadline: float, freezes: bool = False,
    ) -> None:  # fmt: skip
        self.id, self.pid, self.keep = number, pid, keep
        self.stdin: int | None = stdin
        self.outputs, self.pending = outputs, pending
        self.started, self.deadline, self.freezes = time.monotonic(), deadline, freezes
        self.received = {1: 0, 2: 0}
        self.status: int | None = None
        self.timed_out = False
        self.limit: str | None = None
        """Name of the limit that ended it."""

    def feed(self) -> None:
        """Writes input as far as the pipe takes it, and closes the pipe after all of it."""
        assert self.stdin is not None
        try:
            while self.pending:
                self.pending = self.pending[os.write(self.stdin, self.pending[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # it has closed its input
            self.pending = memoryview(b"")
        os.close(self.stdin)
        self.stdin = None

    def read(self, pipe: int) -> bytes | None:
        """Reads what a pipe holds; returns the part to keep, or None at the end of the pipe."""
        try:
            received = os.read(pipe, CHUNK)
        except BlockingIOError:
            return b""
        if not received:
            os.close(pipe)
            del self.outputs[pipe]
            return None
        stream = self.outputs[pipe]
        kept = received[: max(0, self.keep - self.received[stream])]
        self.received[stream] += len(received)
        return kept

    @property
    def flooding(self) -> bool:
        return sum(self.received.values()) > max(FLOOD, 2 * self.keep)

    def report(self) -> dict[str, Any]:
        """Returns its result for the owner."""
        assert self.status is not None
        return {
            "id": self.id,
            "exit_code": self.status,
            "seconds": time.monotonic() - self.started,
            "timed_out": self.timed_out,
            "truncated": max(self.received.values()) > self.keep,
            "limit": self.limit,
        }


def start_job(request: dict[str, Any], data: bytes, work: Callable[[], None]) -> Job:
    """Starts a child process that calls `work`, which may replace itself by a program.

    Raises:
        OSError: No process can be started, or no pipe can be opened.
    """
    with contextlib.ExitStack() as stack:
        pipes = []
        for _ in range(3):
            pipes.append(os.pipe())
            stack.callback(_close, *pipes[-1])
        pid = os.fork()
        if pid == 0:
            _become(work, pipes[0][0], pipes[1][1], pipes[2][1])
        stack.pop_all()
    for end in (pipes[0][0], pipes[1][1], pipes[2][1]):
        os.close(end)
    ours = (pipes[0][1], pipes[1][0], pipes[2][0])
    for end in ours:
        os.set_blocking(end, False)
    return Job(
        request["id"],
        pid,
        ours[0],
        {ours[1]: 1, ours[2]: 2},
        memoryview(data),
        request["keep"],
        time.monotonic() + request["timeout_s"],
    )


def set_limits(limits: dict[str, Any], isolated: bool) -> None:
    """Limits this process and its children, as far as the kernel counts for each process."""
    each = {
        resource.RLIMIT_DATA: limits["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: limits["disk_mb"] << 20,
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 1024,
    }
    if isolated:  # elsewhere the kernel counts all processes of the user
        each[resource.RLIMIT_NPROC] = limits["processes"] + 1
    for kind, value in each.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def execute(command: list[str], directory: str, environment: dict[str, str]) -> None:
    """Replaces this process by a program; returns only if that fails."""
    try:
        os.chdir(directory)
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        os.write(2, f"sandbox: cannot run {command[0]!r} in {directory}: {error}\n".encode())
        os._exit(NO_COMMAND)


def exit_code(status: int) -> int:
    """Returns a process's exit code; 128 and the signal's number if a signal ended it, as in a shell."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become(work: Callable[[], None], *ends: int) -> None:
    """Runs in the child; never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for target, end in enumerate(ends):
            os.dup2(end, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        work()
        code = 0
    except OSError as error:  # the owner raises it again
        os.write(2, f"{error.strerror or error}".encode())
        code = min(error.errno or 1, 255)
    except BaseException as error:  # noqa: BLE001 - the child must exit here, not return to the supervisor
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
