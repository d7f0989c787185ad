"""vLLM's own server as a child process."""

from __future__ import annotations

from pathlib import Path

from tidegate.tethered import TetheredService
from tidegate.vllm.options import VLLMOptions

INSIDE = Path(__file__).with_name("inside")


class VLLMProcess(TetheredService):
    """`python -m vllm.entrypoints.openai.api_server`, with the routes that pause it and change its weights.

    Logprobs are asked for as they are after temperature, top-p, top-k and penalties: those of the
    distribution that was drawn from.
    """

    def __init__(self, options: VLLMOptions) -> None:
        super().__init__(Path(), "vLLM server", shares_log=True)
        self._options = options

    def program(self, port: int) -> list[str]:
        return [
            str(self._options.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._options.model), "--host", "127.0.0.1", "--port", str(port),
            "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details",
            "--enable-scale-out", "--worker-extension-cls", "tidegate_worker.ReloadsTied",
            *self._options.arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(INSIDE)}
