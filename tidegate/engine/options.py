"""What `tidegate engine` is told; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One embedded engine.

    `weight_version` labels the weights it starts with. `prefix_cache_mb` bounds what is kept of earlier
    sequences, so that a follow-up turn computes only what is new; 0 keeps nothing.
    """

    model: Path
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_slots: int = 64
    max_context: int = 1024
    prefix_cache_mb: int = 256
    weight_version: int = 0
