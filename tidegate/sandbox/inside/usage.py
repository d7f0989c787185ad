"""What the processes and files of a sandbox use, read from /proc and the file systems."""

from __future__ import annotations

import os
from collections.abc import Iterator

KIB = 1024


class SandboxUsage:
    """Sums over a sandbox.

    Args:
        memory: Bytes of memory that its processes and shared segments hold.
        processes: Processes and threads.
        disk: Bytes of its files.
        files: Number of its files.
    """

    def __init__(self, memory: int, processes: int, disk: int, files: int) -> None:
        self.memory, self.processes, self.disk, self.files = memory, processes, disk, files


def process_ids() -> list[int]:
    """Returns the processes of this process's pid namespace, without the first."""
    return [pid for name in os.listdir("/proc") if name.isdecimal() and (pid := int(name)) != 1]


def descendants(pid: int) -> list[int]:
    """Returns the processes below a process."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def sessions_of(pids: list[int], session: int) -> list[int]:
    """Returns those of the processes that belong to a session (`setsid`)."""
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) == session]


def measure(pids: list[int], file_systems: list[str]) -> SandboxUsage:
    """Sums up processes, and file systems that belong to the sandbox alone."""
    memory = processes = 0
    for pid in pids:
        status = _status(pid)
        memory += KIB * (status.get("RssAnon", 0) + status.get("RssShmem", 0) + status.get("VmSwap", 0))
        processes += status.get("Threads", 0)
    disk = files = 0
    for path in file_systems:
        status_of = os.statvfs(path)
        disk += (status_of.f_blocks - status_of.f_bfree) * status_of.f_frsize
        files += status_of.f_files - status_of.f_ffree
    return SandboxUsage(memory + (_segments() if file_systems else 0), processes, disk, files)


def _children(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
    except OSError:  # it has exited
        return


def _stat(pid: int) -> list[str]:
    """Returns the fields after the command's name."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _status(pid: int) -> dict[str, int]:
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return {}
    wanted = ("RssAnon", "RssShmem", "VmSwap", "Threads")
    return {name: int(value.split()[0]) for name, _, value in lines if name in wanted}


def _segments() -> int:
    """Returns the bytes of System V shared memory, which no process needs to have attached."""
    try:
        with open("/proc/sysvipc/shm") as file:
            return sum(int(line.split()[14]) for line in file.readlines()[1:])
    except OSError:  # a kernel without it
        return 0
