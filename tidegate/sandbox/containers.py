"""The backends `docker` and `podman`, through their command lines.

A sandbox is a container without network, capabilities and writable image. Its files are in memory, where
`docker cp` cannot reach them: they are passed by `cat` and `tar`. The image must have these, `sh`, `sleep`
and `timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import time
from asyncio import subprocess
from dataclasses import dataclass

from tidegate.errors import ConfigError, SandboxError
from tidegate.sandbox.inside.archive import OverLimit
from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.owned import PREFIX, is_orphan, owned_name
from tidegate.sandbox.sandbox import CommandResult, Sandbox

WORK = "/work"
USER = "1000:1000"
START_S = 120.0
"""Longest start of a container; the image may be pulled."""
CALL_S = 60.0
GRACE_S = 10.0
HEADERS = 256 << 20
KILLED = 137
NO_DAEMON, NO_START = 125, "is not running"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a call of the command line returned."""

    code: int
    output: bytes
    errors: bytes
    truncated: bool

    @property
    def message(self) -> str:
        return self.errors[-2_000:].decode("utf-8", "replace").strip() or f"exit code {self.code}"


class ContainerSandbox(Sandbox):
    """A container.

    Args:
        limits: Its limits; files count towards the container's memory.
        program: `docker` or `podman`.
        image: Image of the container.

    Raises:
        ConfigError: No image is given.
    """

    def __init__(self, limits: SandboxLimits, program: str, image: str | None) -> None:
        super().__init__(limits, WORK)
        if not image:
            raise ConfigError(f"the sandbox backend {program!r} needs an image, such as python:3.11-slim")
        self._program, self._image = program, image
        self._name = owned_name()
        self._closed = True
        self._used = False
        """Whether a program has run in it."""
        self._ended_inside = ""
        """How the container ended, if it did after a program ran in it."""

    async def _begin(self) -> None:
        """Starts the container, after containers of ended processes were removed.

        Raises:
            SandboxError: The program is absent, has no daemon, or cannot start the image.
        """
        await self._remove_orphans()
        limits, files = self.limits, f"rw,exec,nosuid,nodev,size={self.limits.disk_mb}m,mode=1777"
        memory = f"{limits.memory_mb + limits.disk_mb}m"
        answer = await self._call(
            ["run", "--detach", "--rm", "--init", "--name", self._name, "--network", "none", "--read-only",
             "--tmpfs", f"{WORK}:{files}", "--tmpfs", f"/tmp:{files}", "--workdir", WORK, "--user", USER,
             "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes),
             "--ulimit", f"cpu={limits.cpu_s}", "--ulimit", "core=0", "--cap-drop", "ALL",
             "--security-opt", "no-new-privileges", "--env", f"HOME={WORK}", "--entrypoint", "sleep",
             self._image, "infinity"],
            START_S,
        )  # fmt: skip
        if answer.code != 0:
            raise SandboxError(f"{self._program} cannot start {self._image!r}: {answer.message}")
        self._closed = False

    async def fresh(self) -> ContainerSandbox:
        return await ContainerSandbox(self.limits, self._program, self._image).start()

    async def _remove_orphans(self) -> None:
        listed = await self._call(
            ["ps", "--all", "--filter", f"name={PREFIX}", "--format", "{{.Names}}"], CALL_S
        )
        if listed.code != 0:
            raise SandboxError(f"{self._program} does not work: {listed.message}")
        if orphans := [name for name in listed.output.decode().split() if is_orphan(name)]:
            await self._call(["rm", "--force", "--volumes", *orphans], CALL_S)

    # ------------------------------------------------------------------ calls

    async def _run(
        self, command: list[str], timeout_s: float, stdin: bytes, env: dict[str, str], cwd: str
    ) -> CommandResult:
        variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        inside = ["timeout", "-s", "KILL", f"{timeout_s:.3f}", *command]
        began = time.monotonic()
        folder = os.path.join(WORK, cwd)
        try:
            answer = await self._exec(
                [*variables, "--workdir", folder], inside, stdin, timeout_s, self.limits.output_bytes
            )
        except OverLimit as ended:
            return CommandResult(KILLED, "", f"{ended}\n", time.monotonic() - began, limit="supervisor")
        self._used = True
        seconds = time.monotonic() - began
        killed = answer.code == KILLED
        timed_out = killed and seconds >= timeout_s
        return CommandResult(
            answer.code,
            answer.output.decode("utf-8", "replace"),
            answer.errors.decode("utf-8", "replace"),
            seconds,
            timed_out,
            answer.truncated,
            "memory" if killed and not timed_out and await self._out_of_memory() else None,
        )

    async def _out_of_memory(self) -> bool:
        answer = await self._call(["inspect", "--format", "{{.State.OOMKilled}}", self._name], CALL_S)
        return answer.output.strip() == b"true"

    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        allowed = max_bytes if max_bytes is not None else self.limits.disk_mb << 20
        script = 'if [ -d "$1" ]; then exit 21; elif [ -f "$1" ]; then exec cat "$1"; else exit 2; fi'
        answer = await self._on_files(script, path, b"", allowed)
        if answer.truncated:
            raise OSError(errno.EFBIG, f"larger than {allowed} bytes", path)
        return answer.output

    async def _write(self, path: str, data: bytes, executable: bool) -> None:
        mode = "755" if executable else "644"
        script = f'mkdir -p "$(dirname "$1")" && rm -f "$1" && cat > "$1" && chmod {mode} "$1"'
        await self._on_files(script, path, data, 0)

    async def _pack(self, max_bytes: int) -> bytes:
        answer = await self._on_files('exec tar -C "$1" -cf - .', WORK, b"", max_bytes + HEADERS)
        if answer.truncated:
            raise OverLimit(f"the files have more than {max_bytes} bytes")
        return answer.output

    async def _unpack(self, tar: bytes) -> None:
        await self._on_files('exec tar -C "$1" -xf -', WORK, tar, 0)

    async def _on_files(self, script: str, path: str, data: bytes, keep: int) -> _Answer:
        command = ["sh", "-c", script, "sh", path]
        answer = await self._exec(["--workdir", WORK], command, data, CALL_S, keep)
        if answer.code != 0:
            known = errno.errorcode.get(answer.code) is not None and not answer.errors
            code = answer.code if known else errno.EIO
            raise OSError(code, answer.errors.decode("utf-8", "replace").strip() or os.strerror(code), path)
        return answer

    async def _exec(
        self, options: list[str], command: list[str], data: bytes, timeout_s: float, keep: int
    ) -> _Answer:
        if self._ended_inside:
            raise OverLimit(self._ended_inside)
        if self._closed:
            raise SandboxError("the sandbox cannot be used: it was closed, or has failed")
        try:
            words = ["exec", "--interactive", *options, self._name, *command]
            answer = await self._call(words, timeout_s + GRACE_S, data, keep)
        except SandboxError:
            await self.close()
            raise
        if answer.code in (1, NO_DAEMON) and (
            NO_START in answer.message or "No such container" in answer.message
        ):
            if not self._closed and self._used:
                self._ended_inside = f"the container has ended: {answer.message}"
            await self.close()
            if self._ended_inside:
                raise OverLimit(self._ended_inside)
            raise SandboxError(f"the sandbox cannot be used: {answer.message}")
        return answer

    async def _call(
        self, arguments: list[str], timeout_s: float, data: bytes = b"", keep: int = 65_536
    ) -> _Answer:
        """Calls the command line; raises SandboxError if it is absent or does not return in time."""
        shown = shlex.join([self._program, *arguments[:2]])
        try:
            process = await asyncio.create_subprocess_exec(
                self._program,
                *arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{shown} cannot be called: {error}; install {self._program}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                _, output, errors, code = await asyncio.gather(
                    _send(process.stdin, data),
                    _collect(process.stdout, keep),
                    _collect(process.stderr, max(keep, 4_096)),
                    process.wait(),
                )
        except TimeoutError:
            raise SandboxError(f"{shown} did not return within {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return _Answer(code, output[0], errors[0], output[1] or errors[1])

    # ------------------------------------------------------------------ end

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.shield(self._call(["rm", "--force", "--volumes", self._name], CALL_S))


async def _send(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the program does not read all of its input
        stdin.write(data)
        await stdin.drain()
    stdin.close()


async def _collect(stream: asyncio.StreamReader, keep: int) -> tuple[bytes, bool]:
    """Returns the beginning of a stream, and whether there was more."""
    kept, truncated = bytearray(), False
    while received := await stream.read(1 << 16):
        truncated = truncated or len(kept) + len(received) > keep
        kept += received[: max(0, keep - len(kept))]
    return bytes(kept), truncated
