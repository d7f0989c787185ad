"""Calls of a client to its gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from tidegate.errors import GatewayError
from tidegate.service.backoff import backoff_s
from tidegate.service.http_client import HttpClient, error_in

CALL_S = 30.0
POLL_S = 30.0
"""Seconds for which one request waits for the end of a group."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0


class ClientCalls(HttpClient):
    """Calls of the gateway, repeated while it is restarting or has too many groups."""

    def __init__(self, url: str, key: str, timeout_s: float, capacity_s: float) -> None:
        super().__init__(key)
        self._url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._capacity_s = capacity_s
        self._closed = False
        self._openai: AsyncOpenAI | None = None

    def openai(self) -> AsyncOpenAI:
        """Returns a client from which those of episodes are derived: making one takes 20 ms of CPU."""
        if self._openai is None:
            self._openai = AsyncOpenAI(base_url=self._url, api_key="unset")
        return self._openai

    async def close(self) -> None:
        """Closes the connections; later calls raise GatewayError."""
        self._closed = True
        if self._openai is not None:
            await self._openai.close()
        await super().close()

    async def call(self, method: str, path: str, body: Any, key: str | None = None) -> Any:
        """Returns the response. Raises GatewayError if it is refused, or fails until the deadline."""
        data = None if body is None else json.dumps(body).encode()
        time = asyncio.get_running_loop().time
        began = answered = time()
        failures = 0
        while True:
            if self._closed:
                raise GatewayError(f"{method} {path}: the client is closed")
            try:
                async with asyncio.timeout(CALL_S + POLL_S):
                    status, content = await self._send(method, self._url + path, data, key)
                if status < 400:
                    return json.loads(content)
                shown = error_in(content).get("message") or content[:200].decode(errors="replace")
                refusal = GatewayError(f"status {status}: {shown}", status=status)
                again = status in (429, 502, 503, 504)
                answered = time() if status == 429 else answered
            except (aiohttp.ClientError, OSError) as error:  # OSError: also a TimeoutError
                refusal, again = GatewayError(f"no response from the gateway at {self._url}: {error!r}"), True
            lost_s, waited_s = time() - answered, time() - began
            if not again or lost_s > self.timeout_s or waited_s > self.timeout_s + self._capacity_s:
                raise refusal
            await asyncio.sleep(backoff_s(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S))
            failures += 1
