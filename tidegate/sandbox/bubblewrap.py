"""The backend `bubblewrap`: namespaces of the kernel, set up by the program bwrap, without a daemon.

A sandbox has its own user, pid, mount, network, IPC and UTS namespaces. Its files are in memory and vanish
with its last process; the system's programs are mounted read-only. Programs in it run as an unprivileged user
without capabilities.

bwrap's own option `--die-with-parent` is not used: an owner killed while bwrap starts would leave a process
that waits without end. The supervisor watches its owner instead.

Where the owner is root, a sandbox gets a user id of the host that no other process has, because the kernel
does not limit the processes of root. Otherwise it has the owner's; the kernel counts per user namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidegate.errors import SandboxError
from tidegate.sandbox.child import readable
from tidegate.sandbox.inside import archive
from tidegate.sandbox.limits import SandboxLimits
from tidegate.sandbox.proxy import PathProxy
from tidegate.sandbox.seccomp import seccomp_filter
from tidegate.sandbox.supervised import SupervisedSandbox, supervisor_command

WORK = "/work"
OWN_FILES = (WORK, "/tmp", "/dev/shm")
USER = 1000
"""User and group id inside."""
HOST_USERS = range(1_500_000_000, 1_600_000_000)
"""Ids of the host's users, one of which a sandbox of root gets."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
CONFIGURATION = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
"""Public settings of the system's libraries."""
ETC = {
    "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:{USER}:{USER}:agent:{WORK}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nagent:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
NOBODY = 65534
CODE = "/.tidegate"
"""Folder of the supervisor's code, inside."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = "install bubblewrap (apt-get install bubblewrap), or choose another backend"


class BubblewrapSandbox(SupervisedSandbox):
    """A sandbox of namespaces.

    Args:
        limits: Its limits.
        read_only: Files and folders of the host that programs in it can read, under the same paths.
        links: Symbolic links in its file system, as path → target; both are absolute.
    """

    def __init__(
        self, limits: SandboxLimits, read_only: Sequence[str] = (), links: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(limits, WORK)
        self._read_only = list(read_only)
        self._links = dict(links or {})
        self._user = _free_host_user()
        self._proxy: PathProxy | None = None
        self._inside: socket.socket | None = None

    async def _begin(self) -> None:
        """Starts the sandbox.

        Raises:
            SandboxError: bwrap is absent, or the kernel refuses the namespaces.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError(f"the program bwrap is not on the PATH: {INSTALL}")
        with contextlib.closing(_Descriptors()) as self._passed:
            arguments, owner = self._arguments(self._passed), self._passed.owner()
            command = [program, *arguments, "--", *self._supervisor(owner)]
            self._inside = await self._start(command, pass_fds=self._passed.inherited(), env={})

    def _arguments(self, passed: _Descriptors) -> list[str]:
        """Returns bwrap's arguments."""
        arguments = [
            "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
            "--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1",
            "--new-session", "--clearenv", "--cap-drop", "ALL",
        ]  # fmt: skip
        if self._user is None:
            arguments += ["--uid", str(USER), "--gid", str(USER)]
        else:  # bwrap waits in its new user namespace until `_prepare` has set the namespace's users
            arguments += ["--info-fd", passed.pipe_from_child(), "--userns-block-fd", passed.pipe_to_child()]
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):  # given up by the supervisor
                arguments += ["--cap-add", capability]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        for folder in OWN_FILES:
            arguments += ["--perms", "0755", "--size", str(self.limits.disk_mb << 20), "--tmpfs", folder]
        arguments += _system_mounts(self._read_only)
        for link, target in self._links.items():
            for parent in reversed(Path(link).parents[:-1]):
                arguments += ["--perms", "0755", "--dir", str(parent)]
            arguments += ["--symlink", target, link]
        for path, text in ETC.items():
            arguments += ["--perms", "0644", "--file", passed.content(text.encode()), path]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        if (rules := seccomp_filter()) is not None:
            arguments += ["--seccomp", passed.content(rules)]
        return arguments

    def _supervisor(self, owner: int) -> list[str]:
        user, path = None if self._user is None else USER, f"{PATH}:{sys.base_prefix}/bin"
        return supervisor_command(CODE, WORK, self.limits, owner, path, OWN_FILES, user)

    async def _prepare(self) -> None:
        self._passed.close_theirs()
        if self._user is None:
            return
        about = b""
        while b"}" not in about:
            await readable(self._passed.from_child)
            if not (part := os.read(self._passed.from_child, 4096)):
                return  # it has ended
            about += part
        process = json.loads(about)["child-pid"]
        for kind in ("uid", "gid"):
            _write(f"/proc/{process}/{kind}_map", f"0 0 1\n{USER} {self._user} 1\n")
        os.write(self._passed.to_child, b"1")

    async def fresh(self) -> BubblewrapSandbox:
        return await BubblewrapSandbox(self.limits, self._read_only, self._links).start()

    async def reach(self, url: str) -> str:
        if self._inside is None:
            raise SandboxError("the sandbox is closed, or already has access to an address")
        inside, self._inside = self._inside, None
        self._proxy = PathProxy(url)
        return await self._proxy.start(inside)

    async def close(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None
        if self._proxy is not None:
            await self._proxy.close()
        await super().close()


class _Descriptors:
    """File descriptors that bwrap inherits, and the ends of its pipes that are ours."""

    def __init__(self) -> None:
        self.theirs: list[int] = []
        self.from_child = self.to_child = -1

    def content(self, data: bytes) -> str:
        """Returns the number of a descriptor from which the data can be read."""
        descriptor = os.memfd_create("sandbox")
        self.theirs.append(descriptor)
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return str(descriptor)

    def inherited(self) -> list[int]:
        """Returns all descriptors that bwrap inherits.

        The end from which we read is one of them: without a reader, bwrap would be killed as it writes, and
        its child would wait for it without end.
        """
        return [*self.theirs, *([self.from_child] if self.from_child >= 0 else [])]

    def owner(self) -> int:
        """Returns a descriptor of this process."""
        self.theirs.append(os.pidfd_open(os.getpid()))
        return self.theirs[-1]

    def pipe_from_child(self) -> str:
        self.from_child, theirs = os.pipe()
        self.theirs.append(theirs)
        return str(theirs)

    def pipe_to_child(self) -> str:
        theirs, self.to_child = os.pipe()
        self.theirs.append(theirs)
        return str(theirs)

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        for end in (self.from_child, self.to_child):
            if end >= 0:
                os.close(end)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _system_mounts(read_only: Sequence[str]) -> list[str]:
    arguments = []
    for path in SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    inside = os.path.dirname(os.path.abspath(archive.__file__))
    paths = [*CONFIGURATION, *_outermost([sys.base_prefix, *map(os.path.abspath, read_only)])]
    mounts = {path: path for path in paths} | {f"{CODE}/inside": inside}
    for folder in sorted({str(parent) for path in mounts for parent in Path(path).parents} | {"/etc"}):
        if not folder.startswith(("/usr/", *mounts)):
            arguments += ["--perms", "0755", "--dir", folder]
    for path, source in mounts.items():
        arguments += ["--ro-bind-try" if path in CONFIGURATION else "--ro-bind", source, path]
    return arguments


def _outermost(paths: Sequence[str]) -> list[str]:
    """Returns the paths that are not below another one, or below the system's."""
    folders = [*SYSTEM, *paths]
    return [
        path
        for path in dict.fromkeys(paths)
        if path not in SYSTEM and not any(Path(other) in Path(path).parents for other in folders)
    ]


def _free_host_user() -> int | None:
    """Returns an id of the host for the users of a new sandbox; None where this process cannot set it."""
    if os.geteuid() != 0:
        return None
    for user in (random.choice(HOST_USERS), NOBODY):
        if all(_has_id(Path(f"/proc/self/{kind}_map"), user) for kind in ("uid", "gid")):
            return user
    return None


def _has_id(table: Path, user: int) -> bool:
    """Returns whether this process's user namespace has an id."""
    lines = [line.split() for line in table.read_text().splitlines()]
    return any(int(first) <= user < int(first) + int(length) for first, _, length in lines)
