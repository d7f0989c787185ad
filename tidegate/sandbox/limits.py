"""Limits of a sandbox."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one sandbox; files are kept in memory, beside `memory_mb`.

    Raises:
        ConfigError: A limit is not positive.
    """

    memory_mb: int = 512
    """Memory of all processes together; each process may also allocate no more."""
    processes: int = 64
    """Processes and threads at the same time."""
    disk_mb: int = 256
    """Files in `/work`, `/tmp` and `/dev/shm` together."""
    output_bytes: int = 65_536
    """Bytes kept of each output of a command, from its beginning."""
    cpu_s: int = 300
    """Processor seconds of each process."""
    wall_s: float = 60.0
    """Longest time of one command, and its default timeout."""

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            if getattr(self, name) <= 0:
                raise ConfigError(f"the sandbox limit {name} = {getattr(self, name)!r} must be positive")
