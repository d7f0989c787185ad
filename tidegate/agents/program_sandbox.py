"""Sandboxes for the programs of the agent `command`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.sandbox import Sandbox, SandboxLimits, open_sandbox

OUTPUT_BYTES = 1_000_000
"""Bytes kept of each output of a program."""


class ProgramSandbox:
    """Opens a sandbox for each episode.

    Args:
        backend: The sandbox's backend; only `bubblewrap` can give access to the gateway alone.
        command: The program and its arguments; those that are files can be read in the sandbox.
        read_only: Further files and folders that the program can read.
        limits: Fields of `SandboxLimits`; `wall_s` is the episode's deadline.

    Raises:
        ConfigError: Another backend, a path that does not exist, or an unknown limit.
    """

    def __init__(
        self, backend: str, command: Sequence[str], read_only: Sequence[str], limits: Mapping[str, Any] | None
    ) -> None:
        if backend != "bubblewrap":
            text = "only bubblewrap gives a program access to the gateway and to nothing else"
            raise ConfigError(f"agent.options.sandbox = {backend!r}: {text}")
        named = [word for word in command if os.path.isabs(word) and os.path.exists(word)]
        self._read_only = list(dict.fromkeys([*map(_existing, read_only), *named]))
        self._limits = _limits({"output_bytes": OUTPUT_BYTES, **(limits or {})})

    async def open(self, seconds: float) -> Sandbox:
        """Opens a sandbox whose commands may take these seconds; raises SandboxError if it cannot start."""
        limits = replace(self._limits, wall_s=max(seconds, 0.001))
        return await open_sandbox(limits, read_only=self._read_only)


def _existing(path: str) -> str:
    if not os.path.exists(path):
        raise ConfigError(f"agent.options.read_only: there is no file or folder {path!r}")
    return os.path.abspath(path)


def _limits(values: Mapping[str, Any]) -> SandboxLimits:
    known = [field.name for field in fields(SandboxLimits) if field.name != "wall_s"]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"agent.options.limits has no {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
            )
    return SandboxLimits(**values)
