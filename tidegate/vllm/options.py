"""What `tidegate vllm` is told."""

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
"""Arguments of vLLM's that are set here, as the protocol needs them."""
ELSEWHERE = ("--api-server-count", "-asc", "--data-parallel-size", "-dp", "--api-key", "--root-path")
"""With these vLLM would have requests where an abort or a publish does not reach them."""


@dataclass(frozen=True, slots=True)
class VLLMOptions:
    """One vLLM server: the interpreter of its environment, its weights and their label, and what is passed to
    it as it is. Raises ConfigError that names an argument which can't be passed."""

    python: Path
    model: Path
    weight_version: int = 0
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in OURS:
                raise ConfigError(f"engine.arguments: {name} is set by tidegate itself; leave it out")
            if name in ELSEWHERE:
                raise ConfigError(
                    f"engine.arguments: {name} is not supported; start several servers (engine.count)"
                )
