"""Options of `tidegate vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import ConfigError

OURS = (
    "--model",
    "--host",
    "--port",
    "--logprobs-mode",
    "--enable-prompt-tokens-details",
    "--enable-scale-out",
    "--worker-extension-cls",
)
"""vLLM arguments that Tidegate sets itself."""
ELSEWHERE = ("--api-server-count", "-asc", "--data-parallel-size", "-dp", "--api-key", "--root-path")
"""Unsupported vLLM arguments: aborts and weight updates would not reach all requests."""


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """One vLLM server: the Python of its environment, the model, its weight version and further arguments.

    Raises ConfigError that names an argument that cannot be passed.
    """

    python: Path
    model: Path
    weight_version: int = 0
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in OURS:
                raise ConfigError(f"engine.arguments: {name} is set by Tidegate; remove it")
            if name in ELSEWHERE:
                raise ConfigError(
                    f"engine.arguments: {name} is not supported; start several servers (engine.count)"
                )
