"""The first process in a sandbox: starts the owner's commands, enforces limits, and exits with its owner.

It is the init process of the sandbox's pid namespace: when it exits, the kernel kills every process in the
sandbox. Programs in the sandbox cannot signal it (an init process ignores signals from its namespace) and
cannot trace it or open its files (it is not dumpable). Without a namespace (backend `none`) it adopts
orphaned processes and kills all its descendants before it exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import select
import signal
import socket
import sys
import time

from tidegate.sandbox.inside import archive
from tidegate.sandbox.inside.frames import CHUNK, FrameBuffer, encode_frame
from tidegate.sandbox.inside.job import FLOOD, Job, execute, exit_code, set_limits, start_job
from tidegate.sandbox.inside.usage import descendants, measure, process_ids, sessions_of

TYPE_CHECKING = False  # as `typing` has it, whose import is a fifth of a sandbox's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONTROL = 0
"""File descriptor of the socket to the owner."""
CHECK_S = 0.05
"""Time between two measurements, while anything runs."""
FULL_S = 1.0
"""Time at the limit of processes after which all of them are killed: a fork bomb."""
KILLED_S = 2.0
"""Longest wait for killed processes."""
OWN_PROCESSES = 16
"""Processes that the supervisor can start beyond the limit, so that a fork bomb does not prevent commands."""
DRAIN = 1 << 20
"""Most bytes read from the pipes of a command that has exited."""
SEND_AHEAD = 1 << 20
"""Bytes that wait for the owner before the output of commands is no longer read."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


class Supervisor:
    """Serves one owner until the owner closes its socket or exits.

    Args:
        control: Socket to the owner.
        options: `work` (folder of the files), `limits`, `file_systems` (those that belong to the sandbox
            alone), `isolated` (whether this is a pid namespace of its own), `environment` and `owner`
            (descriptor of the owner's process).
        wake: Descriptor that becomes readable when a child exits.
    """

    def __init__(self, control: socket.socket, options: dict[str, Any], wake: int) -> None:
        self._control = control
        self._options = options
        self._limits: dict[str, Any] = options["limits"]
        self._isolated: bool = options["isolated"]
        self._wake = wake
        self._frames = FrameBuffer()
        self._outgoing = bytearray()
        self._jobs: dict[int, Job] = {}
        self._left: dict[int, int] = {}
        """Pipes that background processes hold → bytes discarded from them."""
        self._allowed = (0, 0)
        self._next_check = 0.0
        self._full_since: float | None = None
        self._serving = True

    def serve(self) -> None:
        """Returns when the owner has closed its socket or exited."""
        try:
            while self._serving:
                self._step()
        finally:
            self._kill_all()

    # ------------------------------------------------------------------ events

    def _step(self) -> None:
        handlers = self._handlers()
        poll = select.poll()
        for descriptor, (events, _) in handlers.items():
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(self._wait_ms()):
            handlers[descriptor][1]()
        self._reap()
        self._check()
        self._finish_jobs()

    def _handlers(self) -> dict[int, tuple[int, Callable[[], None]]]:
        writable = select.POLLOUT if self._outgoing else 0
        handlers: dict[int, tuple[int, Callable[[], None]]] = {
            CONTROL: (select.POLLIN | writable, self._communicate),
            self._options["owner"]: (select.POLLIN, self._stop),
            self._wake: (select.POLLIN, lambda: _swallow(self._wake)),
        }
        for job in self._jobs.values():
            if job.stdin is not None:
                handlers[job.stdin] = (select.POLLOUT, job.feed)
            if len(self._outgoing) < SEND_AHEAD:
                for pipe in job.outputs:
                    handlers[pipe] = (select.POLLIN, functools.partial(self._forward, job, pipe))
        for pipe in self._left:
            handlers[pipe] = (select.POLLIN, functools.partial(self._discard, pipe))
        return handlers

    def _stop(self) -> None:
        self._serving = False

    def _wait_ms(self) -> float | None:
        """Returns None, for no timeout, if nothing runs."""
        if not self._jobs and not self._busy():
            return None
        ends = [job.deadline for job in self._jobs.values() if not job.timed_out]
        return 1000 * max(0.0, min([self._next_check, *ends]) - time.monotonic())

    def _communicate(self) -> None:
        try:
            if self._outgoing:
                del self._outgoing[: self._control.send(self._outgoing)]
            received = self._control.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._serving = False
        for header, data in self._frames.feed(received):
            self._receive(header, data)

    def _receive(self, request: dict[str, Any], data: bytes) -> None:
        if request["operation"] == "cancel":
            for job in self._jobs.values():
                if job.id == request["id"]:
                    self._kill(job)
            return
        usage = measure([], self._options["file_systems"])
        self._allowed = (max(self._limits["disk_mb"] << 20, usage.disk), max(archive.MAX_FILES, usage.files))
        freezes = request["operation"] == "pack" and self._isolated
        if freezes:
            self._signal_others(signal.SIGSTOP)
        try:
            job = start_job(request, data, functools.partial(self._work, request))
        except OSError as error:
            text = f"sandbox: no process can be started: {error.strerror}\n".encode()
            self._send({"id": request["id"], "stream": 2}, text)
            failed = {"exit_code": 126, "seconds": 0.0, "timed_out": False, "truncated": False}
            self._send({"id": request["id"], **failed, "limit": "processes"})
            return
        job.freezes = freezes
        self._jobs[job.pid] = job

    def _work(self, request: dict[str, Any]) -> None:
        """Runs in the child process."""
        set_limits(self._limits, self._isolated)
        folder: str = self._options["work"]
        path = os.path.join(folder, request.get("path", ""))
        with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as output:
            match request["operation"]:
                case "run":
                    execute(
                        request["command"], path, {**self._options["environment"], **request["environment"]}
                    )
                case "read":
                    archive.read_file(path, output, request["max_bytes"])
                case "write":
                    archive.write_file(path, source, request["mode"])
                case "pack":
                    archive.pack(folder, output, request["max_bytes"])
                case "unpack":
                    archive.unpack(source, folder)

    # ------------------------------------------------------------------ jobs

    def _forward(self, job: Job, pipe: int) -> None:
        stream = job.outputs[pipe]
        if kept := job.read(pipe):
            self._send({"id": job.id, "stream": stream}, kept)
        if job.flooding and job.limit is None and job.status is None:
            job.limit = "output"
            self._kill(job)

    def _discard(self, pipe: int) -> None:
        try:
            discarded = len(os.read(pipe, CHUNK))
        except BlockingIOError:
            return
        self._left[pipe] += discarded
        if not discarded or self._left[pipe] > FLOOD:
            os.close(pipe)
            del self._left[pipe]

    def _send(self, header: dict[str, Any], data: bytes = b"") -> None:
        self._outgoing += encode_frame(header, data)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._jobs:
                self._jobs[pid].status = exit_code(status)

    def _finish_jobs(self) -> None:
        for pid, job in list(self._jobs.items()):
            if job.status is None:
                continue
            if job.stdin is not None:
                os.close(job.stdin)
            for pipe in list(job.outputs):
                drained = 0
                while drained < DRAIN and pipe in job.outputs and select.select([pipe], [], [], 0)[0]:
                    self._forward(job, pipe)
                    drained += CHUNK
            self._left.update(dict.fromkeys(job.outputs, 0))
            del self._jobs[pid]
            if job.freezes:
                self._signal_others(signal.SIGCONT)
            self._send(job.report())

    # ------------------------------------------------------------------ limits

    def _check(self) -> None:
        now = time.monotonic()
        for job in self._jobs.values():
            if now >= job.deadline and not job.timed_out and job.status is None:
                job.timed_out = True
                self._kill(job)
        if now < self._next_check or not self._busy():
            return
        limit = self._exceeded(self._others(), now)
        if limit is not None:
            self._full_since = None
            for job in self._jobs.values():
                job.limit = job.limit or limit
            self._kill_all()
        self._next_check = time.monotonic() + max(CHECK_S, 10 * (time.monotonic() - now))

    def _exceeded(self, pids: list[int], now: float) -> str | None:
        """Returns the name of a limit that the sandbox exceeds."""
        allowed: int = self._limits["processes"]
        if len(pids) > allowed + OWN_PROCESSES:  # the kernel does not limit this user's
            return "processes"
        usage = measure(pids, self._options["file_systems"])
        if usage.memory > self._limits["memory_mb"] << 20:
            return "memory"
        if usage.disk > self._allowed[0]:
            return "disk"
        if usage.files > self._allowed[1]:
            return "files"
        if usage.processes < allowed:
            self._full_since = None
            return None
        self._full_since = self._full_since or now
        too_many = usage.processes > allowed + OWN_PROCESSES
        return "processes" if too_many or now - self._full_since > FULL_S else None

    def _busy(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _others(self) -> list[int]:
        return process_ids() if self._isolated else descendants(os.getpid())

    def _kill(self, job: Job) -> None:
        """Kills a job and the processes of its session."""
        for pid in {job.pid, *sessions_of(self._others(), job.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        """Kills all processes, and waits for their ends as long as that takes no more than a moment."""
        until = time.monotonic() + KILLED_S
        while time.monotonic() < until:
            self._signal_others(signal.SIGKILL)
            self._reap()
            if not self._others():
                return
            time.sleep(0.002)

    def _signal_others(self, number: signal.Signals) -> None:
        if self._isolated and os.getpid() == 1:  # else this would be every process of the machine
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)
            return
        for pid in self._others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def main() -> None:
    """Serves the owner at the other end of the standard input; the argument has the options, as JSON."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    control = socket.socket(fileno=CONTROL)
    with contextlib.suppress(OSError):  # a machine on which it is already higher
        _write("/proc/self/oom_score_adj", "1000")
    if (user := options.get("user")) is not None:
        _become_user(user, options["work"])
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL if options["isolated"] else 0, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if not options["isolated"]:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake = _child_signals()
    os.umask(0o022)
    os.chdir(options["work"])
    if options["isolated"]:
        limit = options["limits"]["processes"] + OWN_PROCESSES
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    _announce(control, options["isolated"])
    control.setblocking(False)
    Supervisor(control, options, wake).serve()


def _announce(control: socket.socket, isolated: bool) -> None:
    """Sends the owner a socket that is bound inside, and closes the standard error, which is the owner's."""
    ready = encode_frame({"ready": True})
    if isolated:
        with socket.socket() as inside:
            inside.bind(("127.0.0.1", 0))
            socket.send_fds(control, [ready], [inside.fileno()])
    else:
        control.sendall(ready)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _become_user(user: int, work: str) -> None:
    """Gives up root of the user namespace, and with it all capabilities."""
    for folder in (work, "/tmp", "/dev/shm"):
        os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _child_signals() -> int:
    """Returns a descriptor that becomes readable when a child exits."""
    wake, theirs = os.pipe()
    for end in (wake, theirs):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return wake


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _swallow(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, CHUNK)
