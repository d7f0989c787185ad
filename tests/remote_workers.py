"""The protocol of workers, call by call."""

from __future__ import annotations

from typing import Any

import aiohttp

WORKER_KEY = "worker-key"


class Refused(Exception):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Attempts:
    """A worker's calls, each made once."""

    def __init__(self, url: str, name: str = "w1") -> None:
        self.url = url
        self.name = name

    async def __aenter__(self) -> Attempts:
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def next(
        self, capacity: int = 1, wait_s: float = 5.0, worker: str | None = None
    ) -> list[dict[str, Any]]:
        body = {"worker": worker or self.name, "capacity": capacity, "wait_s": wait_s}
        rows: list[dict[str, Any]] = (await self.post("/attempts/next", WORKER_KEY, body))["attempts"]
        return rows

    async def heartbeat(self, attempt: dict[str, Any]) -> None:
        await self.post(f"/attempts/{attempt['attempt']}/heartbeat", WORKER_KEY, {"worker": self.name})

    async def leave(self) -> int:
        ended: int = (await self.post("/attempts/leave", WORKER_KEY, {"worker": self.name}))["ended"]
        return ended

    async def finish(self, attempt: dict[str, Any], **report: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self.post(
            f"/s/{attempt['attempt']}/finish", attempt["finish_key"], report
        )
        return answer

    async def post(self, path: str, key: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post(self.url + path, json=body, headers=headers) as response:
            answer = await response.json()
            if response.status >= 400:
                raise Refused(answer["error"]["message"], response.status)
            return answer
