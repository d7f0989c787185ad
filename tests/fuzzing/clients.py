"""A fuzzed client with a project key: plain calls, feedback, groups, erasure, in any order and any form.

Invariants: no response says that the gateway itself failed; statuses are those that the pages name; accepted
feedback is recorded as it was given; a key sees nothing of another key's.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp

from tests.fakes import Stage
from tests.fuzzing.dialects import DIALECTS
from tests.fuzzing.dialects.base import Dialect
from tests.fuzzing.sending import Sender
from tests.fuzzing.stories import Case, Failure
from tests.fuzzing.values import VALUES, junk, spoiled, written

NAMES = ["g1", "g2", "x-_", "", "a b", "é", "../x", "a" * 65, "a" * 5000, "\x00", "me.g1", "?x=1", "%2e"]
SESSIONS = ["one", "two", "", "a" * 400, "\xff", "one "]
_STATUSES = frozenset({200, 400, 401, 403, 404, 405, 409, 410, 413, 429})


class ClientStory:
    """One client with a key of its own."""

    def __init__(self, stage: Stage, http: aiohttp.ClientSession, name: str, key: str, seed: str) -> None:
        self._stage = stage
        self._sender = Sender(stage, http, _STATUSES)
        self._name = name
        self._key = key
        self._rng = random.Random(seed)
        self._replies: list[str] = []
        self._groups: list[str] = []
        self._episodes: list[str] = []
        self._histories: list[list[Any]] = [[]]

    @property
    def seen(self) -> Counter[str]:
        return self._sender.seen

    async def run(self, cases: int) -> None:
        """Raises Failure."""
        moves: list[Callable[[], Any]] = [
            self._call, self._call, self._call, self._feedback, self._feedback, self._open, self._seal,
            self._show, self._erase, self._finish,
        ]  # fmt: skip
        while self.seen.total() < cases:
            await self._rng.choice(moves)()
        for session in self._stage.gateway.sessions.all():
            if session.client == self._name:
                await self._stage.gateway.drop(session.group_id or "")

    async def _call(self) -> None:
        rng = self._rng
        dialect = rng.choice(list(DIALECTS.values()))
        history = rng.choice(self._histories) if dialect.name == "chat" else []
        history = [*history, *dialect.question(rng, history)]
        body: Any = dialect.body(rng, history)
        headers = {}
        if rng.random() < 0.5:
            headers["x-tidegate-session"] = rng.choice(SESSIONS)
        if rng.random() < 0.2 and isinstance(body, dict):
            body = {**body, "metadata": rng.choice([{"session_id": rng.choice(SESSIONS)}, *VALUES])}
        if rng.random() < 0.3:
            headers["x-stainless-retry-count"] = rng.choice(["0", "1", "x"])
        for _ in range(rng.choice([0, 0, 0, 1])):
            body = spoiled(rng, body)
        status, data = await self._send("POST", f"/v1{dialect.path}", body, headers, dialect)
        if status == 200:
            self._remember(dialect, history, data)

    def _remember(self, dialect: Dialect, history: list[Any], data: bytes) -> None:
        answer = (
            dialect.streamed(data)
            if data.startswith((b"data:", b"event:"))
            else dialect.whole(json.loads(data))
        )
        if answer is None:
            raise Failure("the stream does not end as it should")
        self._replies.append(answer.id)
        if dialect.name == "chat":
            self._histories.append([*history, *answer.items])

    async def _feedback(self) -> None:
        rng = self._rng
        about = rng.choice([*self._replies, *SESSIONS, "no"])
        value = rng.choice(["up", "down", 0, 1, -3.5, *VALUES])
        body: Any = {"id": about, "value": value, "name": rng.choice(["a", "b", "\ud800", "x" * 300])}
        for name in ("reply_only", "comment", "correction"):
            if rng.random() < 0.2:
                body[name] = rng.choice([True, "so", *VALUES])
        if rng.random() < 0.2:
            body = spoiled(rng, body)
        exact = json.dumps(body).encode()  # `written` may change a name
        status, data = await self._send("POST", "/v1/feedback", exact)
        if status == 200:
            self._groups.append(json.loads(data)["group"])
            self._check_recorded(body)

    def _check_recorded(self, body: dict[str, Any]) -> None:
        """Accepted feedback must be that of one of the client's sessions."""
        value = {"up": 1.0, "down": 0.0}.get(str(body["value"]), body["value"])
        sessions = [one for one in self._stage.gateway.sessions.all() if one.client == self._name]
        found = [
            given
            for one in sessions
            for rewards in (one.rewards, *one.turn_rewards.values())
            for given in rewards.values()
        ]
        if float(value) not in found:
            raise Failure(f"accepted feedback {value!r} is not recorded: {found}")

    async def _open(self) -> None:
        body: Any = {"task_id": self._rng.choice(["t", "", "é", "a" * 300]), "metadata": junk(self._rng, 2)}
        if self._rng.random() < 0.6:
            body = {"task_id": "t"}
        status, data = await self._send("POST", f"/v1/groups/{self._group()}/episodes", body)
        if status == 200:
            self._episodes.append(json.dumps(json.loads(data)))

    async def _finish(self) -> None:
        if not self._episodes:
            return
        row = json.loads(self._rng.choice(self._episodes))
        body: Any = {"reward": self._rng.choice([1.0, 0, *VALUES]), "output": "so"}
        if self._rng.random() < 0.3:
            body = spoiled(self._rng, body)
        headers = {"authorization": f"Bearer {row['finish_key']}"}
        await self._send("POST", f"/s/{row['episode']}/finish", body, headers)

    async def _seal(self) -> None:
        known = [json.loads(row)["episode"] for row in self._episodes] or ["no"]
        body: Any = {"sessions": self._rng.sample(known, self._rng.randint(1, min(3, len(known))))}
        if self._rng.random() < 0.3:
            body = spoiled(self._rng, body)
        await self._send("POST", f"/v1/groups/{self._group()}/seal", body)

    async def _show(self) -> None:
        wait = self._rng.choice(["", "?wait_s=0", "?wait_s=-1", "?wait_s=nan", "?wait_s=61", "?wait_s=x"])
        await self._send(self._rng.choice(["GET", "DELETE"]), f"/v1/groups/{self._group()}{wait}", None)

    async def _erase(self) -> None:
        name = self._rng.choice([*self._replies[-3:], *self._groups[-3:], *NAMES, "one"])
        await self._send("DELETE", f"/v1/conversations/{quote(name, safe='')}", None)

    def _group(self) -> str:
        return quote(self._rng.choice(["g1", "g2", "g3", *self._groups[-2:], *NAMES]), safe="")

    async def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        dialect: Dialect | None = None,
    ) -> tuple[int, bytes]:
        data = None if body is None else body if isinstance(body, bytes) else written(self._rng, body)
        sent = {"authorization": f"Bearer {self._key}", **(headers or {})}
        case = Case(data or b"", sent, dialect or DIALECTS["chat"], [])
        return await self._sender.send(method, path, case, data is not None)
