"""vLLM servers owned by a run, each behind an adapter for SGLang's protocol."""

from __future__ import annotations

from pathlib import Path

from tidegate.config import EngineSettings
from tidegate.service.external import READY_S
from tidegate.service.service import LOOPBACK, Service
from tidegate.settings.sections import arguments_of
from tidegate.settings.servers import VLLMCommand
from tidegate.trainer.processes.provider import CurrentWeights


class VLLMServer(Service):
    """Runs `tidegate vllm` with the current weights."""

    ready_s = READY_S

    def __init__(
        self,
        settings: EngineSettings,
        current: CurrentWeights,
        directory: Path,
        name: str,
        index: int,
        address: str = LOOPBACK,
    ) -> None:
        def arguments() -> list[str]:
            return [*vllm_arguments(settings, current, index), "--host", address]

        super().__init__("vllm", arguments, directory, name=name)


def vllm_arguments(settings: EngineSettings, current: CurrentWeights, index: int) -> list[str]:
    """Return the arguments of `tidegate vllm`, without the address."""
    weights, version = current()
    engine = {"python": settings.python, "arguments": settings.numbered(index)}
    command = VLLMCommand.model_validate({"model": {"path": weights}, "engine": engine})
    return [*arguments_of(command), "--weight-version", str(version)]
