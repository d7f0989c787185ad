"""Sandboxes whose first process is Tidegate's supervisor, which the owner calls through a socket."""

from __future__ import annotations

import array
import asyncio
import compileall
import errno
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidegate.errors import SandboxError
from tidegate.sandbox.child import MESSAGE_BYTES, SandboxProcess, readable
from tidegate.sandbox.inside import archive
from tidegate.sandbox.inside.archive import OverLimit
from tidegate.sandbox.inside.frames import MAX_HEADER, FrameBuffer, encode_frame
from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.sandbox import CommandResult, Sandbox
from tidegate.service.process import machine_load

START = """import sys, types
for name in ("tidegate", "tidegate.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{code!r}]
from tidegate.sandbox.inside.supervisor import main
main()"""
"""Imports the supervisor alone: the packages around it need more than the standard library."""
START_S = 20.0
"""Longest start of a sandbox."""
FILES_S = 60.0
"""Longest operation on files."""
GRACE_S = 10.0
"""Grace period after an operation's timeout; then the sandbox counts as failed."""
CLOSE_S = 2.0
ENDED = {"exit_code": 137, "seconds": 0.0, "timed_out": False, "truncated": False, "limit": "supervisor"}
"""Result of the calls of a sandbox whose supervisor has ended after a program ran in it."""
HEADERS = 256 << 20
"""Most bytes of the headers in a tar."""


@dataclass(slots=True)
class _Call:
    """An operation in progress."""

    ended: asyncio.Future[dict[str, Any]]
    began: float = field(default_factory=time.monotonic)
    outputs: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})


class SupervisedSandbox(Sandbox):
    """Base of the backends `bubblewrap` and `none`; see `start`."""

    def __init__(self, limits: SandboxLimits, work: str) -> None:
        super().__init__(limits, work)
        self._calls: dict[int, _Call] = {}
        self._last_id = 0
        self._failure: str | None = "it has not been started"
        self._receiving: asyncio.Task[None] | None = None
        self._used = False
        """Whether a program has run in it."""
        self._ended_inside = False

    async def _start(self, command: list[str], **options: Any) -> socket.socket | None:
        """Starts the supervisor; returns the socket that it has bound inside, if it has one.

        Args:
            command: The supervisor's command line.
            options: Those of `subprocess.Popen`.

        Raises:
            SandboxError: It does not start.
        """
        await asyncio.to_thread(_compile_supervisor)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                self._process = SandboxProcess(command, theirs.fileno(), **options)
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox cannot start {command[0]!r}: {error}") from error
        return await self._connect(ours)

    async def _connect(self, ours: socket.socket) -> socket.socket | None:
        try:
            async with asyncio.timeout(START_S):
                await self._prepare()
                ready, descriptors = await _receive_sockets(ours)
                if not ready:
                    text = await self._process.end(CLOSE_S)
                    raise SandboxError(f"the sandbox does not start: {text}")
                self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException as error:
            ours.close()
            self._process.kill()
            if not isinstance(error, SandboxError):
                await asyncio.shield(self._process.end(CLOSE_S))
            if isinstance(error, TimeoutError):
                raise SandboxError(
                    f"the sandbox does not start within {START_S:g} s; {machine_load()}"
                ) from None
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox does not start: {error}") from error
            raise
        self._failure = None
        self._receiving = asyncio.create_task(self._receive(FrameBuffer()))
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    async def _prepare(self) -> None:
        """Does what the new process waits for."""

    # ------------------------------------------------------------------ calls

    async def _run(
        self, command: list[str], timeout_s: float, stdin: bytes, env: dict[str, str], cwd: str
    ) -> CommandResult:
        self._used = True
        request = {"operation": "run", "command": command, "environment": env, "path": cwd}
        end, outputs = await self._call(request, stdin, timeout_s, self.limits.output_bytes)
        return CommandResult(
            int(end["exit_code"]),
            outputs[1].decode("utf-8", "replace"),
            outputs[2].decode("utf-8", "replace"),
            float(end["seconds"]),
            bool(end["timed_out"]),
            bool(end["truncated"]),
            end["limit"],
        )

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        allowed = max_bytes if max_bytes is not None else self.limits.disk_mb << 20
        return await self._on_files({"operation": "read", "path": path, "max_bytes": allowed}, b"", allowed)

    async def _write(self, path: str, data: bytes, executable: bool) -> None:
        mode = 0o755 if executable else 0o644
        await self._on_files({"operation": "write", "path": path, "mode": mode}, data)

    async def _pack(self, max_bytes: int) -> bytes:
        return await self._on_files({"operation": "pack", "max_bytes": max_bytes}, b"", max_bytes + HEADERS)

    async def _unpack(self, tar: bytes) -> None:
        await self._on_files({"operation": "unpack"}, tar)

    async def _on_files(self, request: dict[str, Any], data: bytes, keep: int = 0) -> bytes:
        """Returns the output of an operation on files; raises its error."""
        end, outputs = await self._call(request, data, FILES_S, max(keep, MESSAGE_BYTES))
        name = request.get("path") or self.work
        message = bytes(outputs[2][:MESSAGE_BYTES]).decode("utf-8", "replace")
        if end["limit"] is not None or end["timed_out"]:
            raise OverLimit(
                f"{request['operation']} {name!r}: ended by the limit {end['limit'] or 'of time'}"
            )
        if message.startswith("OverLimit: "):
            raise OverLimit(message.removeprefix("OverLimit: "))
        if end["exit_code"] != 0:
            raise OSError(int(end["exit_code"]) if message else errno.EIO, message or "killed", name)
        return bytes(outputs[1])

    async def _call(
        self, request: dict[str, Any], data: bytes, timeout_s: float, keep: int
    ) -> tuple[dict[str, Any], dict[int, bytearray]]:
        if self._ended_inside:
            return ENDED, _Call(asyncio.get_running_loop().create_future()).outputs
        if self._failure is not None:
            raise SandboxError(f"the sandbox cannot be used: {self._failure}")
        self._last_id += 1
        number = self._last_id
        call = self._calls[number] = _Call(asyncio.get_running_loop().create_future())
        try:
            header = {**request, "id": number, "timeout_s": timeout_s, "keep": keep}
            self._writer.write(encode_frame(header, data))
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await call.ended, call.outputs
        except TimeoutError:
            await self._fail(f"it did not respond within {timeout_s + GRACE_S:g} s")
            raise SandboxError(f"the sandbox cannot be used: {self._failure}") from None
        except asyncio.CancelledError:
            self._writer.write(encode_frame({"operation": "cancel", "id": number}))
            raise
        finally:
            del self._calls[number]

    async def _receive(self, frames: FrameBuffer) -> None:
        """Passes results to the calls that wait for them, until the sandbox ends."""
        reason = "its first process has ended"
        try:
            while received := await self._reader.read(1 << 18):
                for header, data in frames.feed(received):
                    self._deliver(header, data)
        except ConnectionError:  # it was killed
            pass
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = f"its first process sent an invalid message: {error!r}"
        self._ended_inside = self._used and self._failure is None
        await self._fail(reason)

    def _deliver(self, header: dict[str, Any], data: bytes) -> None:
        call = self._calls.get(header["id"])
        if call is None:  # cancelled
            return
        if "stream" in header:
            call.outputs[header["stream"]] += data
        elif not call.ended.done():
            call.ended.set_result(header)

    # ------------------------------------------------------------------ end

    @property
    def closed(self) -> bool:
        return self._failure is not None

    async def close(self) -> None:
        if self._failure is None:
            self._failure = "it was closed"
            if self._receiving is not None:
                self._receiving.cancel()
            await asyncio.shield(self._end())
        elif self._receiving is not None:
            await asyncio.wait([self._receiving])

    async def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            await self._end()

    async def _end(self) -> None:
        self._writer.close()
        for call in self._calls.values():
            if call.ended.done():
                continue
            if self._ended_inside:
                call.ended.set_result({**ENDED, "seconds": time.monotonic() - call.began})
            else:
                call.ended.set_exception(SandboxError(f"the sandbox cannot be used: {self._failure}"))
        await self._process.end(CLOSE_S)


def supervisor_command(
    code: str,
    work: str,
    limits: SandboxLimits,
    owner: int,
    path: str,
    file_systems: Sequence[str] = (),
    user: int | None = None,
) -> list[str]:
    """Returns the command line of a supervisor.

    Args:
        code: Folder that has `inside`.
        work: Folder of the files.
        limits: Limits that it enforces.
        owner: Inherited descriptor of the owner's process; the supervisor exits when that process does.
        path: PATH of the commands.
        file_systems: Those that belong to the sandbox alone; none if the processes are not isolated either.
        user: Id of the user that it becomes, from root of a user namespace.
    """
    options = {
        "work": work,
        "limits": asdict(limits),
        "owner": owner,
        "file_systems": list(file_systems),
        "isolated": bool(file_systems),
        "environment": {"PATH": path, "HOME": work, "LANG": "C.UTF-8", "USER": "agent"},
        "user": user,
    }
    start = START.format(code=code)
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start, json.dumps(options)]


@functools.cache
def _compile_supervisor() -> None:
    """Writes the byte code of the supervisor, which would else compile itself in each sandbox; where the
    folder is read-only it still does."""
    compileall.compile_dir(Path(archive.__file__).parent, quiet=2)


async def _receive_sockets(ours: socket.socket) -> tuple[bytes, list[int]]:
    """Waits for the first message; returns it with the file descriptors that came with it."""
    await readable(ours.fileno())
    descriptors = array.array("i")
    message, ancillary, _, _ = ours.recvmsg(MAX_HEADER, socket.CMSG_SPACE(descriptors.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors)
