"""A fuzzed agent with tools: calls by both routes, replies to the counterpart, in any order and any form.

Invariants: no response says that the gateway itself failed; statuses are those that the pages name; the
record has the calls that were answered, and no others.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp

from tests.environments import TASK
from tests.fakes import Stage
from tests.fuzzing.dialects import DIALECTS
from tests.fuzzing.sending import Sender
from tests.fuzzing.stories import Case, Failure
from tests.fuzzing.values import VALUES, spoiled, written
from tidegate.gateway.client import SessionAccess

TOOLS = ["enter", "read", "enter", "leave", "", "a b", "é", "../x", "a/b", "n" * 65, "\x00", "?x=1", "%2e"]
KEYS = ["1", "2", "3", "", "\xff", "k" * 400]
METHODS = ["tools/list", "tools/call", "initialize", "ping", "resources/list", "no/such", ""]
_STATUSES = frozenset({200, 202, 400, 401, 403, 404, 405, 406, 410, 413, 415, 424})


class ToolStory:
    """One agent with a session of its own, in an environment with state."""

    def __init__(self, stage: Stage, access: SessionAccess, http: aiohttp.ClientSession, seed: str) -> None:
        self._stage = stage
        self._access = access
        self._rng = random.Random(seed)
        self._sender = Sender(stage, http, _STATUSES)
        self._answered: Counter[tuple[str, bool]] = Counter()
        self._by_key: dict[str, str] = {}
        """Content of the answer by idempotency key."""
        self._finished = False

    @property
    def seen(self) -> Counter[str]:
        return self._sender.seen

    async def run(self, cases: int) -> None:
        """Raises Failure."""
        moves: list[Callable[[], Any]] = [self._list, self._call, self._call, self._call, self._respond]
        moves += [self._mcp, self._mcp]
        while self.seen.total() < cases:
            await self._rng.choice(moves)()
            if not self._finished and self._rng.random() < 0.02:
                await self._finish()
        await self._finish()
        await self._stage.client.delete_session(self._access.session_id)

    async def _list(self) -> None:
        await self._send(self._rng.choice(["GET", "GET", "POST", "DELETE"]), "/tools")

    async def _call(self) -> None:
        rng = self._rng
        name, key = rng.choice(TOOLS), rng.choice(KEYS) if rng.random() < 0.4 else None
        body: Any = rng.choice([{"digit": rng.randint(-1, 10)}, {"length": rng.choice([0, 5, 10**6])}, {}])
        for _ in range(rng.choice([0, 0, 1, 2])):
            body = spoiled(rng, body)
        headers = {} if key is None else {"idempotency-key": key}
        status, data = await self._send("POST", f"/tools/{quote(name, safe='')}", body, headers)
        if status == 200:
            self._count(json.loads(data), key)

    def _count(self, answer: dict[str, Any], key: str | None = None) -> None:
        content = str(answer["content"])
        if key and key in self._by_key:
            if self._by_key[key] != content:
                raise Failure(f"the key {key!r} got {self._by_key[key][:100]!r}, then {content[:100]!r}")
            return
        if key:
            self._by_key[key] = content
        self._answered[content, bool(answer["error"])] += 1

    async def _respond(self) -> None:
        rng = self._rng
        body: Any = {"message": {"role": "assistant", "content": rng.choice(["so", *VALUES])}}
        for _ in range(rng.choice([0, 0, 1, 2])):
            body = spoiled(rng, body)
        await self._send("POST", "/respond", body)

    async def _mcp(self) -> None:
        rng = self._rng
        version = rng.choice(["2025-06-18", "2025-11-25", "2024-11-05"])
        params: Any = {"name": rng.choice(TOOLS), "arguments": {"digit": rng.randint(-1, 10)}}
        if (method := rng.choice(METHODS)) == "initialize":
            client = {"name": "fuzz", "version": "1"}
            params = {"protocolVersion": version, "capabilities": {}, "clientInfo": client}
        body: Any = {"jsonrpc": "2.0", "id": rng.choice([1, 7, "x"]), "method": method, "params": params}
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            body = spoiled(rng, body)
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if rng.random() < 0.5:
            headers["mcp-protocol-version"] = rng.choice([version, "2026-07-28", "1", "é"])
        if rng.random() < 0.1:
            del headers[rng.choice(["accept", "content-type"])]
        status, data = await self._send("POST", "/mcp", body, headers)
        result = json.loads(data).get("result") if status == 200 else None
        if isinstance(result, dict) and "isError" in result:
            self._count({"content": result["content"][0]["text"], "error": result["isError"]})

    async def _finish(self) -> None:
        """Ends the episode; checks that its record has the calls that were answered."""
        if self._finished:
            return
        self._finished = True
        await self._stage.client.finish(self._access.session_id, reward=1.0)
        trajectory = await self._stage.client.trajectory(self._access.session_id)
        recorded = Counter((call.result, call.error) for call in trajectory.tool_calls)
        if recorded != self._answered:
            missing, more = self._answered - recorded, recorded - self._answered
            raise Failure(f"answered and not recorded: {missing}; recorded and not answered: {more}"[:2000])

    async def _send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        data = b"" if body is None else written(self._rng, body)
        key = self._access.api_key if self._rng.random() < 0.97 else "tg-wrong"
        case = Case(data, {"authorization": f"Bearer {key}", **(headers or {})}, DIALECTS["chat"], [])
        return await self._sender.send(method, f"/s/{self._access.session_id}{path}", case, body is not None)


async def tool_story(stage: Stage, http: aiohttp.ClientSession, seed: str) -> ToolStory:
    access = await stage.client.open_session(task=TASK)
    return ToolStory(stage, access, http, seed)
