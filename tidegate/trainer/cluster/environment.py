"""What goes along to a cluster's nodes: variables of the environment, and what must be alike on all of them.

Nothing of Ray.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tidegate import __version__
from tidegate.errors import ConfigError

PREFIXES = ("HF_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "SGLANG_", "VLLM_", "WANDB_", "TIDEGATE_")
NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
RAYS_OWN = ("CUDA_VISIBLE_DEVICES",)
MARK = ".cluster"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def passed_on(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that processes on other nodes get; `more` are those of `cluster.environment`.

    They travel as an argument of the actors: Ray's own way for them shows them in logs and on command lines.
    Raises ConfigError where one of `more` is not set.
    """
    missing = [name for name in more if name not in environment]
    if missing:
        raise ConfigError(f"cluster.environment names {', '.join(missing)}, which is not set here")
    return {
        name: value
        for name, value in environment.items()
        if name in more or (name not in RAYS_OWN and (name.startswith(PREFIXES) or name in NAMES))
    }


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Where an actor is, and what it runs there."""

    address: str
    python: str = field(default_factory=platform.python_version)
    tidegate: str = __version__

    def unlike(self, other: ClusterNode) -> str | None:
        """What is not as on the other node, in words."""
        pairs = (("Python", self.python, other.python), ("tidegate", self.tidegate, other.tidegate))
        differ = [f"{what} {mine} instead of {theirs}" for what, mine, theirs in pairs if mine != theirs]
        if not differ:
            return None
        return f"node {self.address} has {' and '.join(differ)} (node {other.address}); install that there"


def set_gloo_interface(address: str) -> None:
    """Have process groups of this process, and of those that it starts, use the node's own network.

    Gloo listens at the address that the machine's name stands for, which often is 127.0.0.1. What the
    variable says already holds.
    """
    interfaces = psutil.net_if_addrs()
    names = [name for name, has in interfaces.items() if any(one.address == address for one in has)]
    if names:
        os.environ.setdefault(GLOO_INTERFACE, names[0])


@dataclass(frozen=True, slots=True)
class SharedDirProbe:
    """A file by which a process on another node finds out whether it sees the run's directory."""

    directory: Path
    text: str

    @classmethod
    def leave(cls, directory: Path) -> SharedDirProbe:
        directory.mkdir(parents=True, exist_ok=True)
        mark = cls(directory, secrets.token_hex(16))
        (directory / MARK).write_text(mark.text)
        return mark

    def seen(self) -> bool:
        """Whether the directory there is the one that the mark was left in."""
        try:
            return (self.directory / MARK).read_text() == self.text
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class ActorContext:
    """What every actor of a run is made with."""

    run: str
    mark: SharedDirProbe
    folder: Path
    """The working directory of the command: relative paths in settings begin there."""
    environment: Mapping[str, str] = field(repr=False)

    def unpack(self) -> None:
        """Take on the environment and the working directory, where there is such a one."""
        os.environ.update(self.environment)
        if self.folder.is_dir():
            os.chdir(self.folder)
