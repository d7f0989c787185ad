"""The control plane's client: what a trainer calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

import aiohttp
import msgpack

from tidegate.errors import GatewayError
from tidegate.types import Group, Outcome, Sampling, Split, Task, Trajectory

ADMIN_KEY = "TIDEGATE_ADMIN_KEY"
"""The environment variable in which a gateway is given its admin key."""
CALL_S = 30.0
FINISH_S = 60.0
"""How long a call to finish may take, half of which it waits for the reward; then it asks again."""
_TRIES = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class SessionAccess:
    """What an agent is handed: where to call, and its secret."""

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A finished session in brief; `oldest_version` None: unknown for some token, or no turn."""

    session_id: str
    outcome: Outcome
    reward: float | None
    reward_parts: dict[str, float]
    agent_reward: float | None
    turns: int
    sampled_tokens: int
    oldest_version: int | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in a listing; `state` is `live`, `ready` or `leased`."""

    id: str
    state: str
    oldest_version: int | None
    sessions: list[str]


class GatewayClient:
    """Calls one gateway. Every call has a deadline, and until then it is repeated with back-off.

    Made within a running event loop or before it; `close` (or `async with`) frees its connections.
    """

    def __init__(self, url: str, admin_key: str | None = None, call_s: float = CALL_S) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key is not None else {}
        self._call_s = call_s
        self._http: aiohttp.ClientSession | None = None
        self._answered = False
        self._gone: str | None = None
        self._limits: set[asyncio.Timeout] = set()
        """Of the calls under way."""

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def give_up(self, why: str) -> None:
        """It does not come back: the calls under way, and all others, fail at once."""
        self._gone = why
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(
        self,
        *,
        task: Task | None = None,
        env: str | None = None,
        group_id: str | None = None,
        slot: int | None = None,
        split: Split = "train",
        sampling: Sampling | None = None,
        deadline_s: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        seed: int | None = None,
        limits: Mapping[str, float] | None = None,
        untrained_models: Sequence[str] = (),
        epoch: int | None = None,
    ) -> SessionAccess:
        """Open a session; `limits` are its budgets: `turns`, `tokens`, `seconds`, `calls`. Calls with a model
        name in `untrained_models` are recorded and not trained on.

        With a trainer's `epoch` it ends `cancelled` when a newer trainer comes; 410 where one has come.
        Repeated when its answer is lost: a session that nobody was told of expires by itself.
        """
        body = {
            "task": None if task is None else task.to_wire(),
            "env": env,
            "group_id": group_id,
            "slot": slot,
            "split": split,
            "sampling": (sampling or Sampling()).to_wire(),
            "deadline_s": deadline_s,
            "metadata": dict(metadata or {}),
            "seed": seed,
            "limits": dict(limits or {}),
            "untrained_models": list(untrained_models),
            "trainer_epoch": epoch,
        }
        return SessionAccess(**await self._json("POST", "/sessions", body))

    async def finish(
        self,
        session_id: str,
        *,
        output: str | None = None,
        outcome: Outcome | str | None = None,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
        epoch: int | None = None,
        timeout_s: float = FINISH_S,
    ) -> SessionSummary:
        """End a session and have it rewarded, however long the rewards of others before it take.

        `timeout_s`: how long the gateway may be silent. Raises GatewayError: 404 where it is not there any
        more, 410 where a trainer newer than `epoch` came.
        """
        body = {
            "output": output,
            "outcome": None if outcome is None else str(outcome),
            "reward": reward,
            "metrics": dict(metrics or {}),
            "error": error,
            "trainer_epoch": epoch,
            "wait_s": timeout_s / 2,
        }
        row: dict[str, Any] = {}
        while "outcome" not in row:  # it is still being rewarded
            row = await self._json("POST", f"/sessions/{_quote(session_id)}/finish", body, timeout_s)
        return SessionSummary(**{**row, "outcome": Outcome(row["outcome"])})

    async def post_reward(
        self, session_id: str, value: float, name: str = "reward", turn: int | None = None
    ) -> None:
        """Post a part of a running session's reward, or of one of its turns, by index."""
        body = {"value": value, "name": name, "turn": turn}
        await self._json("POST", f"/sessions/{_quote(session_id)}/reward", body)

    async def trajectory(self, session_id: str) -> Trajectory:
        """A finished session's trajectory."""
        data = await self._call("GET", f"/sessions/{_quote(session_id)}/trajectory")
        return Trajectory.from_wire(msgpack.unpackb(data))

    async def delete_session(self, session_id: str) -> None:
        """Abort and forget a session. Idempotent."""
        await self._call("DELETE", f"/sessions/{_quote(session_id)}")

    # -- groups ----------------------------------------------------------------------------------

    async def seal_group(
        self, group_id: str, task_id: str, sessions: Sequence[str], epoch: int | None = None
    ) -> None:
        """Make a group of finished sessions ready to be leased. Idempotent. 410 as in `finish`."""
        body = {"task_id": task_id, "sessions": list(sessions), "trainer_epoch": epoch}
        await self._json("POST", f"/groups/{_quote(group_id)}/seal", body)

    async def drop_group(self, group_id: str, epoch: int | None = None) -> list[Trajectory]:
        """End a group with all of its sessions, live ones too; return what each had recorded, replies that
        were complete. Idempotent: the second time there are none. 410 as in `finish`."""
        data = await self._call("DELETE", f"/groups/{_quote(group_id)}", {"trainer_epoch": epoch})
        return [Trajectory.from_wire(wire) for wire in msgpack.unpackb(data)["trajectories"]]

    async def list_groups(self) -> list[GroupRow]:
        return [GroupRow(**row) for row in (await self._json("GET", "/groups"))["groups"]]

    async def enter(self, epoch: int) -> None:
        """A trainer begins: what older ones leased is ready again, what they ran ends `cancelled`.

        Any call that carries the epoch does the same. Raises GatewayError (410) where a newer one has come.
        """
        await self.lease(epoch, 0)

    async def lease(self, epoch: int, max: int, wait_s: float = 0.0) -> list[Group]:
        """Up to `max` ready groups, waiting up to `wait_s` for the first one.

        Raises GatewayError with status 410 where a newer trainer holds the groups.
        """
        # An answer that was lost on its way is given again to the same key.
        body = {"trainer_epoch": epoch, "max": max, "wait_s": wait_s, "key": secrets.token_hex(8)}
        data = await self._call("POST", "/groups/lease", body, timeout_s=self._call_s + wait_s)
        return [Group.from_wire(wire) for wire in msgpack.unpackb(data)["groups"]]

    async def ack(self, epoch: int, lease_id: str, outcome: str) -> None:
        """End a lease: the gateway frees the group. Idempotent."""
        body = {"trainer_epoch": epoch, "lease_id": lease_id, "outcome": str(outcome)}
        await self._json("POST", "/groups/ack", body)

    # -- engines, health -------------------------------------------------------------------------

    async def add_engine(
        self, url: str, control: Sequence[str] = (), *, admitted: bool | None = None
    ) -> dict[str, Any]:
        """Take an engine in; its row. `control`: where `url` is a router, the engines behind it. Idempotent.

        `admitted` is for who leads the gateway, a trainer: whether the engine is at the live version and
        gets calls. From then on what is added without it waits to be admitted.
        """
        body = {"url": url, "control": list(control), "admitted": admitted}
        row: dict[str, Any] = await self._json("POST", "/engines", body)
        return row

    async def admit_engine(self, url: str, admitted: bool) -> None:
        """Whether an engine that is there gets calls, a trainer's word; raises GatewayError (404) where it
        is not there."""
        await self._json("PATCH", "/engines", {"url": url, "admitted": admitted})

    async def remove_engine(self, url: str) -> None:
        await self._json("DELETE", "/engines", {"url": url})

    async def list_engines(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._json("GET", "/engines"))["engines"]
        return rows

    async def health(self) -> dict[str, str]:
        """`instance` and `status`; raises GatewayError where the gateway says that it is not well."""
        row: dict[str, str] = await self._json("GET", "/health")
        return row

    async def metrics(self) -> str:
        """The Prometheus text."""
        return (await self._call("GET", "/metrics")).decode()

    # -- HTTP ------------------------------------------------------------------------------------

    async def _json(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        return json.loads(await self._call(method, path, body, timeout_s))

    async def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> bytes:
        """One call, repeated with back-off until its deadline: a gateway that is restarted comes back.

        One that never answered is given up after a few tries, as its address is likely wrong.
        """
        seconds = timeout_s if timeout_s is not None else self._call_s
        wait, tries, last = _FIRST_WAIT_S, 0, "is silent"
        try:
            async with self._limit(seconds):
                while True:
                    try:
                        answer = await self._once(method, path, body)
                        self._answered = True
                        return answer
                    except (aiohttp.ClientError, OSError) as error:
                        tries, last = tries + 1, f"cannot be reached: {error}"
                        if tries >= _TRIES and not self._answered:
                            raise GatewayError(f"the gateway at {self.url} {last}") from error
                    except GatewayError as error:
                        if error.status != 503 or path == "/health":
                            raise
                        last = f"says: {error}"
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                    wait = min(wait * 2, _LONGEST_WAIT_S)
        except TimeoutError:
            if self._gone is not None:
                raise GatewayError(self._gone) from None
            raise GatewayError(
                f"the gateway at {self.url} did not answer {method} {path} within {seconds:g} s: it {last}"
            ) from None

    @contextlib.asynccontextmanager
    async def _limit(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError after so long, or once the gateway is given up."""
        async with asyncio.timeout(seconds if self._gone is None else 0) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def _once(self, method: str, path: str, body: Any) -> bytes:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        # Python's json, not orjson: a reward that is NaN must arrive as such, to be refused as such.
        try:
            data = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise GatewayError(f"{method} {path}: what was to be sent is no JSON: {error}") from error
        headers = {"Content-Type": "application/json"}
        async with self._http.request(method, self.url + path, data=data, headers=headers) as response:
            answer = await response.read()
            if response.status >= 400:
                raise GatewayError(_message(answer, response.status), status=response.status)
            return answer


def _quote(part: str) -> str:
    return quote(part, safe="")


def _message(answer: bytes, status: int) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {status}: {answer[:200].decode(errors='replace')}"
