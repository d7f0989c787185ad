"""vLLM servers that a run starts and owns, each behind SGLang's protocol."""

from __future__ import annotations

from pathlib import Path

from tidegate.config import EngineSettings
from tidegate.service.external import READY_S
from tidegate.service.service import LOOPBACK, Service
from tidegate.trainer.processes.provider import Live


class VLLMServer(Service):
    """`tidegate vllm` with what is live."""

    ready_s = READY_S

    def __init__(
        self,
        settings: EngineSettings,
        live: Live,
        directory: Path,
        name: str,
        index: int,
        address: str = LOOPBACK,
    ) -> None:
        def arguments() -> list[str]:
            return [*vllm_arguments(settings, live, index), "--host", address]

        super().__init__("vllm", arguments, directory, name=name)


def vllm_arguments(settings: EngineSettings, live: Live, index: int) -> list[str]:
    """The command line of `tidegate vllm`, the address apart."""
    weights, version = live()
    passed = [f"--argument={one}" for one in settings.numbered(index)]
    return [
        "--python", str(settings.python), "--model", str(weights), "--weight-version", str(version), *passed,
    ]  # fmt: skip
