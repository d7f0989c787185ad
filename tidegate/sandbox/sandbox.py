"""The interface of all sandboxes: commands, files, snapshots."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tidegate.errors import ConfigError
from tidegate.sandbox.inside.archive import clean_tar, make_tar
from tidegate.sandbox.limits import SandboxLimits


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The end of a command."""

    exit_code: int
    """As in a shell: 127 for a command that cannot be started, 128 and a signal's number."""
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    truncated: bool = False
    """An output was longer than the limit `output_bytes`; its beginning was kept."""
    limit: str | None = None
    """Limit for which the command was killed: `memory`, `processes`, `disk`, `files` or `output`; or
    `supervisor`: the sandbox's first process ended, which a program in it can cause."""

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and self.limit is None


class Sandbox(ABC):
    """An isolated place with files and processes of its own; made by `open_sandbox`.

    The commands of a sandbox share its files. A process that a command leaves running continues until the
    sandbox is closed. Relative paths are below the folder `work`.

    Attributes:
        limits: Limits of the sandbox.
        work: Folder of the files, as programs in the sandbox see it.
    """

    def __init__(self, limits: SandboxLimits, work: str) -> None:
        self.limits = limits
        self.work = work

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> Self:
        """Starts the sandbox; `open_sandbox` calls it.

        Raises:
            SandboxError: It does not start.
        """
        beginning = asyncio.create_task(self._begin())
        try:
            await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.wait([beginning])  # a start that is cancelled half-way would leave processes
            if beginning.exception() is None:
                await self.close()
            raise
        return self

    async def run(
        self,
        command: str | Sequence[str],
        timeout_s: float | None = None,
        *,
        stdin: bytes | str = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
    ) -> CommandResult:
        """Runs a command and waits for its end.

        Exceeded limits and timeouts are results, not errors: the program in the sandbox caused them. So is
        the end of the sandbox's first process: a policy must not be able to discard an episode by it.

        Args:
            command: A line for the shell, or a program and its arguments.
            timeout_s: Seconds after which the command's session of processes is killed; at most, and by
                default, the limit `wall_s`.
            stdin: The command's standard input.
            env: Environment variables, besides PATH, HOME, LANG and USER. Nothing of the host's is passed.
            cwd: Folder in which the command starts.

        Raises:
            SandboxError: The sandbox is closed, or has failed.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        allowed = min(self.limits.wall_s, timeout_s if timeout_s is not None else self.limits.wall_s)
        content = stdin.encode() if isinstance(stdin, str) else stdin
        return await self._run(words, allowed, content, dict(env or {}), cwd)

    async def write(self, path: str, data: bytes | str, *, executable: bool = False) -> None:
        """Writes a file, and makes its folders.

        Raises:
            OSError: The sandbox refuses the file: a full disk, a folder of that name.
            SandboxError: The sandbox is closed, or has failed.
        """
        await self._write(path, data.encode() if isinstance(data, str) else data, executable)

    @abstractmethod
    async def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Returns the content of a regular file.

        Args:
            path: The file.
            max_bytes: Most bytes to return; the limit `disk_mb` by default.

        Raises:
            OSError: The sandbox has no such file, it is not a regular one, or it is larger than `max_bytes`.
            SandboxError: The sandbox is closed, or has failed.
        """

    async def snapshot(self, max_bytes: int | None = None) -> bytes:
        """Returns the files of the folder `work` as a tar.

        It has plain files and folders only: no links, devices, sockets, owners or setuid bits.

        Args:
            max_bytes: Most bytes of all files together; the limit `disk_mb` by default.

        Raises:
            OverLimit: The files are too many or too large.
            SandboxError: The sandbox is closed, or has failed.
        """
        allowed = max_bytes if max_bytes is not None else self.limits.disk_mb << 20
        return clean_tar(await self._pack(allowed), allowed)

    async def restore(self, snapshot: bytes) -> None:
        """Writes the files of a snapshot into the folder `work`.

        Raises:
            OverLimit: The snapshot is damaged, has invalid names, or exceeds the limit `disk_mb`.
            OSError: The sandbox refuses a file.
            SandboxError: The sandbox is closed, or has failed.
        """
        await self._unpack(clean_tar(snapshot, self.limits.disk_mb << 20))

    async def add_files(self, files: Mapping[str, bytes | str]) -> None:
        """Writes several files, given as path → content; see `write`."""
        contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        below = {path: (data, False) for path, data in contents.items() if not os.path.isabs(path)}
        if below:
            await self.restore(make_tar(below))
        for path in contents.keys() - below.keys():
            await self._write(path, contents[path], False)

    async def reach(self, url: str) -> str:
        """Lets the programs in the sandbox call one HTTP address, and nothing else of the network.

        Args:
            url: Address on the owner's side. Only calls of the model (`/v1/…`), of tools, of `mcp` and of
                `respond` are passed on, below its path and below `/`.

        Returns:
            The URL of that address inside the sandbox.

        Raises:
            ConfigError: The backend cannot do this.
        """
        raise ConfigError(f"{type(self).__name__} cannot give access to {url}: use the backend bubblewrap")

    @abstractmethod
    async def fresh(self) -> Sandbox:
        """Opens an empty sandbox of the same kind; raises SandboxError if it cannot start."""

    @abstractmethod
    async def close(self) -> None:
        """Ends all processes of the sandbox and removes its files; may be called twice."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the sandbox was closed or has failed."""

    @abstractmethod
    async def _begin(self) -> None: ...

    @abstractmethod
    async def _run(
        self, command: list[str], timeout_s: float, stdin: bytes, env: dict[str, str], cwd: str
    ) -> CommandResult: ...

    @abstractmethod
    async def _write(self, path: str, data: bytes, executable: bool) -> None: ...

    @abstractmethod
    async def _pack(self, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def _unpack(self, tar: bytes) -> None: ...
