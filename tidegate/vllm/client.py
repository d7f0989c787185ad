"""HTTP client of vLLM's server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError
from tidegate.service.http_client import error_in

CONTROL_S = 600.0
"""Timeout of control calls, which may load large weights."""
CONNECT_S = 10.0
PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to request ids."""


class VLLMClient:
    """Methods raise EngineError if vLLM fails or is unreachable, RequestError if it refuses a request."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    # -- sampling

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return orjson.loads(await self._call("POST", "/inference/v1/generate", body, None))  # type: ignore[no-any-return]

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the pieces of a reply; the last one has the usage."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            async with self._http.post(
                self._url + "/inference/v1/generate", data=orjson.dumps(body), timeout=timeout
            ) as response:
                if response.status != 200:
                    raise _failed(response.status, await response.read())
                buffer = b""
                async for chunk in response.content.iter_any():
                    *events, buffer = (buffer + chunk).split(b"\n\n")
                    for event in events:
                        data = event.removeprefix(b"data:").strip()
                        if data == b"[DONE]":
                            return
                        yield _piece(data)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"vLLM: {str(error) or type(error).__name__}", retryable=True) from None
        raise EngineError("vLLM's stream ended early", retryable=True)

    async def abort(self, names: Sequence[str]) -> None:
        """Abort these requests; an empty list is not sent, because vLLM would abort all."""
        if names:
            await self.control("/abort_requests", {"request_ids": [PREFIX + name for name in names]})

    # -- weights

    async def pause(self, mode: Literal["abort", "wait"]) -> None:
        await self.control(f"/pause?mode={mode}&clear_cache=true")

    async def resume(self) -> None:
        await self.control("/resume")

    async def reload(self, directory: Path) -> None:
        body = {"method": "reload_published", "kwargs": {"weights_path": str(directory)}}
        await self.control("/collective_rpc", body)

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter; vLLM refuses a name that it has.

        With `load_inplace` vLLM would read the files again before every step (vllm-project/vllm#41482).
        """
        await self.control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self.control("/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_cache(self) -> bool:
        """Reset the prefix cache; False while requests run."""
        answer = await self.control("/reset_prefix_cache")
        return bool(orjson.loads(answer)["success"])

    async def label(self, version: str) -> None:
        await self.control("/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        return str(orjson.loads(await self._call("GET", "/weight_info", None, CONTROL_S))["weight_version"])

    async def healthy(self) -> None:
        await self._call("GET", "/health", None, CONTROL_S)

    async def max_context(self) -> int:
        models = orjson.loads(await self._call("GET", "/v1/models", None, CONTROL_S))
        return int(models["data"][0]["max_model_len"])

    async def control(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        return await self._call("POST", path, body, CONTROL_S)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_S)
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._http.request(method, self._url + path, data=data, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"vLLM {path}: {str(error) or type(error).__name__}", retryable=True) from None
        if response.status != 200:
            raise _failed(response.status, answer)
        return answer


def _piece(data: bytes) -> dict[str, Any]:
    piece: dict[str, Any] = orjson.loads(data)
    if "error" in piece:
        code = piece["error"].get("code") if isinstance(piece["error"], dict) else None
        raise _failed(code if isinstance(code, int) else 500, data)
    return piece


def _failed(status: int, data: bytes) -> EngineError | RequestError:
    message = str(error_in(data).get("message") or data.decode(errors="replace"))
    if status in (400, 422):
        return RequestError(f"vLLM refused the request: {message[:1000]}")
    return EngineError(f"vLLM returned HTTP {status}: {message[:300]}", retryable=status >= 500)
