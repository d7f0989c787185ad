"""Environment of the processes on a cluster's nodes, and checks that nodes match. Does not import Ray."""

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

PREFIXES = (
    "HF_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "PYTORCH_", "SGLANG_", "VLLM_", "WANDB_", "TIDEGATE_"
)  # fmt: skip
NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")
# Ray gives each actor its own GPUs by this variable.
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES",)
PROBE_FILE = ".cluster"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def forwarded_variables(environment: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Select the variables that processes on other nodes get; `more` is `cluster.environment`.

    They are passed as an argument of the actors: Ray's runtime environment shows them in logs and on command
    lines. Raises ConfigError if one of `more` is not set.
    """
    missing = [name for name in more if name not in environment]
    if missing:
        raise ConfigError(f"cluster.environment names {', '.join(missing)}, which is not set here")
    return {
        name: value
        for name, value in environment.items()
        if name in more or (name not in SET_BY_RAY and (name.startswith(PREFIXES) or name in NAMES))
    }


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Address and software versions of a node."""

    address: str
    python: str = field(default_factory=platform.python_version)
    tidegate: str = __version__

    def mismatch(self, other: ClusterNode) -> str | None:
        """Describe the versions that differ from the other node's; None if none do."""
        pairs = (("Python", self.python, other.python), ("tidegate", self.tidegate, other.tidegate))
        differ = [f"{name} {own} instead of {theirs}" for name, own, theirs in pairs if own != theirs]
        if not differ:
            return None
        return f"node {self.address} has {' and '.join(differ)} (node {other.address}); install that there"


def set_gloo_interface(address: str) -> None:
    """Set gloo's network interface for this process and its children, unless the variable is set.

    By default gloo listens on the address of the host name, which often is 127.0.0.1.
    """
    interfaces = psutil.net_if_addrs()
    names = [name for name, own in interfaces.items() if any(each.address == address for each in own)]
    if names:
        os.environ.setdefault(GLOO_INTERFACE, names[0])


@dataclass(frozen=True, slots=True)
class SharedDirProbe:
    """A file that shows a process on another node whether the run's directory is visible there."""

    directory: Path
    text: str

    @classmethod
    def create(cls, directory: Path) -> SharedDirProbe:
        directory.mkdir(parents=True, exist_ok=True)
        probe = cls(directory, secrets.token_hex(16))
        (directory / PROBE_FILE).write_text(probe.text)
        return probe

    def is_visible(self) -> bool:
        try:
            return (self.directory / PROBE_FILE).read_text() == self.text
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class ActorContext:
    """Constructor argument of every actor of a run."""

    run: str
    probe: SharedDirProbe
    folder: Path
    """Working directory of the command, to which paths in settings are relative."""
    environment: Mapping[str, str] = field(repr=False)

    def apply(self) -> None:
        os.environ.update(self.environment)
        if self.folder.is_dir():
            os.chdir(self.folder)
