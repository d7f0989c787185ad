"""Control calls to one engine: pause, load weights, resume, attest the version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tidegate.errors import EngineError, UnfitEngineError
from tidegate.weights.process_group import transfer_s

CALL_S = 60.0


NEEDED = {"output_token_logprobs": "its logprob", "weight_versions": "the version of the weights behind it"}
"""Of a reply's `meta_info`, for every token."""


ANSWERS_S = 2.0
"""How long an engine that is out of service may take to say that it is there again."""


class EngineControl:
    """The control calls of one engine, SGLang's protocol; raises EngineError."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._http = http

    async def call(self, path: str, body: dict[str, Any] | None = None, size: int = 0) -> dict[str, Any]:
        """POST `body` (GET where it is None). Every call has the deadline CALL_S, and in addition the time
        that so many bytes of weights may take which it moves."""
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=CALL_S + transfer_s(size))
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"engine {self.url}{path}: {type(error).__name__}: {error}", retryable=True
            ) from None
        if reply.status != 200:
            raise EngineError(
                f"engine {self.url}{path}: {reply.status}: {text[:300]}", retryable=reply.status >= 500
            )
        try:
            answer = orjson.loads(text)
        except orjson.JSONDecodeError:
            answer = {}
        return answer if isinstance(answer, dict) else {}

    async def version(self) -> int:
        """The version that the engine attests; raises EngineError where it is no number."""
        said = (await self.call("/model_info")).get("weight_version")
        try:
            return int(str(said))
        except ValueError:
            raise EngineError(f"engine {self.url} attests the version {said!r}, which is no number") from None

    async def label(self) -> str | None:
        """What it calls its weights; None where it does not say so soon."""
        try:
            async with asyncio.timeout(ANSWERS_S):
                return str((await self.call("/model_info")).get("weight_version"))
        except (EngineError, TimeoutError):
            return None

    async def check_sample(self) -> None:
        """Have it sample a token as for training. Raises EngineError; where the token comes without what
        training needs of it, as servers of other versions may send it, UnfitEngineError."""
        body = {
            "input_ids": [0], "return_logprob": True, "stream": False,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        }  # fmt: skip
        meta = (await self.call("/generate", body)).get("meta_info")
        missing = [what for name, what in NEEDED.items() if not (isinstance(meta, dict) and meta.get(name))]
        if missing:
            raise UnfitEngineError(
                f"engine {self.url}: a token comes without {' and '.join(missing)}, so nothing that it "
                "samples could be trained on; SGLang 0.5.23, `tidegate engine` and `tidegate vllm` send it"
            )

    async def load(self, weights: Path, version: int) -> None:
        """Bring the engine to `version`, the one in that directory; whatever happens, it is asked to go on
        afterwards."""
        size = await asyncio.to_thread(_size_of, weights)
        body = {
            "model_path": str(weights), "weight_version": str(version), "flush_cache": True,
            "abort_all_requests": False,
        }  # fmt: skip
        await self.pause()
        try:
            await self.call("/update_weights_from_disk", body, size)
            await self.verify(version)
        finally:
            await self.resume()

    async def pause(self) -> None:
        await self.call("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.call("/continue_generation", {})

    async def verify(self, version: int) -> None:
        """Raises EngineError where it attests another version."""
        attested = await self.version()
        if attested != version:
            raise EngineError(f"engine {self.url} attests version {attested} after loading {version}")


def _size_of(weights: Path) -> int:
    """In bytes; 0 where they are not there, or not any more, which the engine will say."""
    try:
        return sum(file.stat().st_size for file in weights.iterdir())
    except FileNotFoundError:
        return 0
