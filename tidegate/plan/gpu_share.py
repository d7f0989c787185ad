"""The share of a GPU's memory that SGLang or vLLM takes beside the trainer, by an argument of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.config import Settings
from tidegate.errors import ConfigError
from tidegate.trainer.processes.gpus import engine_gpus, visible_gpus

ARGUMENTS = {"sglang": "--mem-fraction-static", "vllm": "--gpu-memory-utilization"}
BESIDE = {"sglang": 6 * 10**9, "vllm": 10**9}
"""Memory of one engine besides its share, in bytes: CUDA's context, and SGLang's passes and CUDA graphs."""
STEPS = 20
"""Number of values that may be proposed, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What the engines of one set take of the GPU that they share with the trainer's only rank."""

    kind: str
    engines: int
    value: float | None
    """The argument's value; None if it is not in `engine.arguments`, and the engine takes nearly all."""

    @property
    def argument(self) -> str:
        return ARGUMENTS[self.kind]

    @property
    def taken(self) -> float:
        """The part of the memory that the engines take."""
        return self.engines * (1.0 if self.value is None else self.value)

    def proposed(self, available: int, trainer: int) -> float:
        """Returns the largest value that fits beside the trainer's bytes; 0 if none does."""
        left = (available - trainer) / self.engines - BESIDE[self.kind]
        return max(0, int(left / available * STEPS)) / STEPS


def gpu_shares(settings: Settings) -> list[GpuShare]:
    """Returns a share for each set of SGLang or vLLM servers on the trainer's GPU; none on other GPUs."""
    found = []
    for first in settings.engine_sets:
        own = settings.of_engines(first)
        argument = ARGUMENTS.get(own.engine.kind)
        if argument is not None and not own.engine.urls and _shares(settings, first):
            found.append(GpuShare(own.engine.kind, own.engine.count, _number(own.engine.value_of(argument))))
    return found


def _shares(settings: Settings, engines: str) -> bool:
    kind, _, index = settings.trainer.device.partition(":")
    if kind != "cuda" or settings.trainer.ranks > 1:
        return False
    try:
        gpus = engine_gpus(settings, len(visible_gpus())).engines[engines]
    except ConfigError:  # refused by name before the start
        return False
    return any(int(index or 0) in own for own in gpus)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:  # the engine refuses it
        return 0.0
