"""Options of `tidegate engine`; importable without torch."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one embedded engine.

    `weight_version` labels the weights at start. `prefix_cache_mb` is the size of the prefix
    cache; 0 disables it. `quantize` is the type to which weights are rounded for sampling (`rounding`).
    """

    model: Path
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_slots: int = 64
    max_context: int = 1024
    prefix_cache_mb: int = 256
    weight_version: int = 0
    _: KW_ONLY
    quantize: str | None = None
