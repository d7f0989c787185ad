"""Calls of a client to its gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from tidegate.errors import RUN_ENDED, GatewayError
from tidegate.service.backoff import back_off
from tidegate.service.http_client import HttpClient, error_in

CALL_S = 30.0
POLL_S = 30.0
"""Seconds for which one request waits for the end of a group."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
_GAP_S = 30.0
"""Failures with longer gaps between them are of several outages."""


class ClientCalls(HttpClient):
    """Calls of the gateway, repeated while it is restarting or has too many groups."""

    def __init__(self, url: str, key: str, timeout_s: float, capacity_s: float) -> None:
        super().__init__(key)
        self._url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._capacity_s = capacity_s
        self._closed = False
        self._openai: AsyncOpenAI | None = None
        self._lost_at: float | None = None
        """When the calls began to fail, of all groups together: they wait once, and not in turn."""
        self._failed_at = 0.0
        self._run_end: GatewayError | None = None
        """How the run ended: a gateway that then cannot be reached has stopped, and is not waited for."""

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
        began = time()
        failures = 0
        while True:
            if self._closed:
                raise GatewayError(f"{method} {path}: the client is closed")
            try:
                async with asyncio.timeout(CALL_S + POLL_S):
                    status, content = await self._send(method, self._url + path, data, key)
                if status < 400:
                    self._lost_at = None
                    if path.startswith("/v1/groups/") and path.endswith("/episodes"):
                        self._run_end = None  # a new run has begun
                    return json.loads(content)
                shown = error_in(content).get("message") or content[:200].decode(errors="replace")
                refusal = GatewayError(f"status {status}: {shown}", status=status)
                again = status in (429, 502, 503, 504)
                if status == 410 and str(shown).startswith(RUN_ENDED):
                    self._run_end = refusal
                if status < 500:
                    self._lost_at = None
            except (aiohttp.ClientError, OSError) as error:  # OSError: also a TimeoutError
                refusal, again = GatewayError(f"no response from the gateway at {self._url}: {error!r}"), True
            if again and self._run_end is not None and refusal.status != 429:
                raise self._run_end
            lost_s, waited_s = self._lost_s(refusal.status, time()), time() - began
            if not again or lost_s > self.timeout_s or waited_s > self.timeout_s + self._capacity_s:
                raise refusal
            failures = await back_off(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S)

    def _lost_s(self, status: int, now: float) -> float:
        """Returns the seconds since when no call of the client was answered, after a call that failed."""
        if 0 < status < 500:
            return 0.0
        if self._lost_at is None or now - self._failed_at > _GAP_S:
            self._lost_at = now
        self._failed_at = now
        return now - self._lost_at
