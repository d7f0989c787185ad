"""A fuzzed worker: polls, heartbeats, finishes and departures, in any order and any form.

Invariants: no response says that the gateway itself failed; statuses are those that the pages name; an
attempt is given to the worker that asked, once, and with nothing of its task but id and messages.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.fakes import Stage
from tests.fuzzing.dialects import DIALECTS
from tests.fuzzing.sending import Sender
from tests.fuzzing.stories import Case, Failure
from tests.fuzzing.values import VALUES, spoiled, written
from tests.remote_workers import WORKER_KEY
from tidegate.types import Task

TASK = Task("t", "none", [{"role": "user", "content": "?"}], answer="4711")
_STATUSES = frozenset({200, 202, 400, 401, 403, 404, 405, 410, 413})


class WorkerStory:
    """One worker, and the trainer that offers attempts."""

    def __init__(self, stage: Stage, http: aiohttp.ClientSession, name: str, seed: str) -> None:
        self._stage = stage
        self._rng = random.Random(seed)
        self._sender = Sender(stage, http, _STATUSES)
        self._names = [name, f"{name}b"]
        self._offered: list[str] = []
        self._taken: list[dict[str, Any]] = []

    @property
    def seen(self) -> Counter[str]:
        return self._sender.seen

    async def run(self, cases: int) -> None:
        """Raises Failure."""
        moves: list[Callable[[], Any]] = [self._offer, self._next, self._next, self._heartbeat, self._finish]
        while self.seen.total() < cases:
            await self._rng.choice(moves)()
            if self._rng.random() < 0.05:
                await self._leave()
        for attempt in self._offered:
            await self._stage.client.delete_session(attempt)

    async def _offer(self) -> None:
        beat = self._rng.choice([60.0, 600.0])
        access = await self._stage.client.open_session(task=TASK, deadline_s=600.0, offer_heartbeat_s=beat)
        self._offered.append(access.session_id)

    async def _next(self) -> None:
        rng = self._rng
        body: Any = {"worker": rng.choice(self._names), "capacity": rng.choice([1, 1, 3])}
        if rng.random() < 0.3:
            body["capacity"] = rng.choice([1024, 1025, *VALUES])
        if rng.random() < 0.2:
            body = spoiled(rng, body)
        if isinstance(body, dict):  # without it a poll waits for long
            body["wait_s"] = rng.choice([0, 0, 0, 0, 0.01, -1, 61, "x"])
        sent = written(rng, body)  # a changed byte may make another name of it
        status, data = await self._send("/attempts/next", sent)
        if status == 200:
            self._check_given(json.loads(sent)["worker"], json.loads(data)["attempts"])

    def _check_given(self, worker: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            session = self._stage.gateway.sessions.get(row["attempt"])
            if session is not None and session.worker != worker:
                raise Failure(f"{row['attempt']} was given to {worker!r} and is of {session.worker!r}")
            if row["attempt"] in [one["attempt"] for one in self._taken]:
                raise Failure(f"{row['attempt']} was given twice")
            if row["task"] != {"id": TASK.id, "messages": TASK.messages}:
                raise Failure(f"a worker was given the task {row['task']}")
        self._taken += rows

    async def _heartbeat(self) -> None:
        attempt = self._rng.choice([*(one["attempt"] for one in self._taken), "no", "a b", "é", "../x"])
        body: Any = {"worker": self._rng.choice([*self._names, "another"])}
        if self._rng.random() < 0.3:
            body = spoiled(self._rng, body)
        await self._send(f"/attempts/{attempt}/heartbeat", body)

    async def _finish(self) -> None:
        if not self._taken:
            return
        row = self._rng.choice(self._taken)
        body: Any = {"output": "so", "outcome": self._rng.choice([None, "agent_error", "cancelled"])}
        if self._rng.random() < 0.3:
            body |= {"reward": self._rng.choice(VALUES), "outcome": self._rng.choice(["completed", *VALUES])}
            body = spoiled(self._rng, body)
        await self._send(f"/s/{row['attempt']}/finish", body, row["finish_key"])

    async def _leave(self) -> None:
        name = self._rng.choice(self._names)
        await self._send("/attempts/leave", {"worker": name})
        self._names += [f"{name}-"]

    async def _send(self, path: str, body: Any, key: str = WORKER_KEY) -> tuple[int, bytes]:
        key = key if self._rng.random() < 0.97 else "tg-wrong"
        sent = body if isinstance(body, bytes) else written(self._rng, body)
        case = Case(sent, {"authorization": f"Bearer {key}"}, DIALECTS["chat"], [])
        return await self._sender.send("POST", path, case)
