"""Calls of the control plane, repeated with backoff until their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tidegate.errors import GatewayError
from tidegate.service.backoff import back_off
from tidegate.service.http_client import HttpClient, error_in

_TRIES = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


class ControlCalls(HttpClient):
    """Sends the calls of one gateway's client.

    Args:
        url: Address of the gateway.
        admin_key: The gateway's admin key, if it has one.
        call_s: Deadline of a call in seconds.
    """

    def __init__(self, url: str, admin_key: str | None, call_s: float) -> None:
        super().__init__(admin_key)
        self.url = url.rstrip("/")
        self._call_s = call_s
        self._has_responded = False
        self._abort_reason: str | None = None
        self._timeouts: set[asyncio.Timeout] = set()
        """Timeouts of the calls in progress."""

    def abort(self, reason: str) -> None:
        """Makes running and future calls raise GatewayError(reason): the gateway was lost for good."""
        self._abort_reason = reason
        for limit in self._timeouts:
            limit.reschedule(asyncio.get_running_loop().time())

    async def _json(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """As `_call`, for a response that is JSON."""
        return json.loads(await self._call(method, path, body, timeout_s))

    async def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """Sends a request and repeats it with backoff until its deadline, as a gateway may be restarting.

        If the gateway never responded before, the call fails after a few tries: its address is likely wrong.
        """
        seconds = timeout_s if timeout_s is not None else self._call_s
        failures, tries, last = 0, 0, "no response"
        try:
            async with self._timeout(seconds):
                while True:
                    try:
                        content = await self._request(method, path, body)
                        self._has_responded = True
                        return content
                    except (aiohttp.ClientError, OSError) as error:
                        tries, last = tries + 1, f"connection failed: {error}"
                        if tries >= _TRIES and not self._has_responded:
                            raise GatewayError(f"cannot reach the gateway at {self.url}: {error}") from error
                    except GatewayError as error:
                        if error.status != 503 or path == "/health":
                            raise
                        last = f"503: {error}"
                    failures = await back_off(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S)
        except TimeoutError:
            if self._abort_reason is not None:
                raise GatewayError(self._abort_reason) from None
            raise GatewayError(
                f"{method} {path}: the gateway at {self.url} did not respond within {seconds:g} s ({last})"
            ) from None

    @contextlib.asynccontextmanager
    async def _timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError after `seconds`, or on `abort`."""
        async with asyncio.timeout(seconds if self._abort_reason is None else 0) as limit:
            self._timeouts.add(limit)
            try:
                yield
            finally:
                self._timeouts.discard(limit)

    async def _request(self, method: str, path: str, body: Any) -> bytes:
        # Python's json, as orjson would turn a NaN reward, which the gateway must refuse, into null.
        try:
            data = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise GatewayError(f"{method} {path}: the body cannot be encoded as JSON: {error}") from error
        status, content = await self._send(method, self.url + path, data)
        if status >= 400:
            shown = f"the gateway responded with status {status}: {content[:200].decode(errors='replace')}"
            raise GatewayError(str(error_in(content).get("message", shown)), status=status)
        return content
