"""Groups of episodes that a client forms, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from openai import AsyncOpenAI

from tidegate.client.calls import POLL_S, ClientCalls
from tidegate.errors import GatewayError, GroupRefusedError, RewardError
from tidegate.types import finite, finite_reward

LEAVE_S = 5.0
FIRST_RETRIES, RETRY_S = 4, 6.0
"""The SDK waits 0.5, 1, 2 and 4 s before its first retries, and 6 to 8 s before each later one."""
TRAINED = ("stepped", "trained")


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """What became of a group that was trained on.

    Attributes:
        group: Name of the group.
        step: The step, with one batch, that trained on it.
    """

    group: str
    step: int


class Client:
    """Forms groups of episodes on a run's gateway. Close it with `close` or `async with`.

    Args:
        url: Address of the gateway.
        key: A project key.
        timeout_s: Seconds for which a call is repeated while the gateway cannot be reached.
        capacity_s: Seconds for which the first episode of a group waits while too many groups have not ended.
    """

    def __init__(self, url: str, key: str, timeout_s: float = 120.0, capacity_s: float = 3600.0) -> None:
        self._http = ClientCalls(url, key, timeout_s, capacity_s)
        self._beginning = asyncio.Lock()
        """Held by the group that begins: groups begin in order, and one at a time polls for capacity."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()

    def group(self, task_id: str) -> ClientGroup:
        """Returns a new group of episodes of one task, whose rewards are compared with each other.

        Args:
            task_id: Any name of the task, for the ledger and for readers of trajectories.
        """
        return ClientGroup(self._http, task_id, self._beginning)


class ClientGroup:
    """Episodes of one task. The end of `async with` offers them to the trainer; `await group` waits until
    they were trained on.

    If the block raises, the group is dropped and nothing of it is trained on. Failed episodes are left out.

    Attributes:
        name: Name of the group on the gateway.
        failures: Outcome and cause of each failed episode.
    """

    def __init__(self, http: ClientCalls, task_id: str, beginning: asyncio.Lock) -> None:
        self.name = secrets.token_hex(8)
        self._http = http
        self._task_id = task_id
        self._beginning = beginning
        self.failures: list[str] = []
        self._finished: list[str] = []
        self._opened = False

    def episode(self, metadata: Mapping[str, Any] | None = None) -> ClientEpisode:
        """Returns a new episode of the group. Episodes may run at the same time.

        Args:
            metadata: JSON object that is stored with the trajectory.
        """
        return ClientEpisode(self, dict(metadata or {}))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._finished:
            await self._call("POST", "/seal", {"sessions": self._finished})
        elif self._opened:
            await leave(self._call("DELETE", ""))
        if error is None and not self._finished:
            raise self._refused("failed", "no episode of it has a reward")

    def __await__(self) -> Generator[Any, None, TrainedGroup]:
        """Waits until the group has ended, however long.

        Returns:
            The step that trained on it.

        Raises:
            GroupRefusedError: It was not trained on, for the reason in the message: too few episodes, too
                stale, equal rewards.
            GatewayError: The gateway cannot be reached, or no longer has the group.
        """
        return self._end().__await__()

    async def _end(self) -> TrainedGroup:
        while not (row := await self._call("GET", f"?wait_s={POLL_S:g}"))["ended"]:
            pass
        if row["state"] not in TRAINED:
            raise self._refused(row["state"], row["why"])
        return TrainedGroup(self.name, int(row["why"].removeprefix("step ")))

    def _refused(self, state: str, why: str | None) -> GroupRefusedError:
        reason = f": {why}" if why else ""
        number = len(self.failures)
        failures = f"; {number} of its episodes failed, the last with {self.failures[-1]}" if number else ""
        text = f"group {self.name} of task {self._task_id} ended {state}{reason}{failures}"
        return GroupRefusedError(text, state=state)

    async def _open_episode(self, metadata: dict[str, Any]) -> dict[str, Any]:
        body = {"task_id": self._task_id, "metadata": metadata, "key": secrets.token_urlsafe(24)}
        if self._opened:
            row: dict[str, Any] = await self._call("POST", "/episodes", body)
            return row
        async with self._beginning:
            row = await self._call("POST", "/episodes", body)
            self._opened = True
        return row

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        return await self._http.call(method, f"/v1/groups/{self.name}{path}", body)


class ClientEpisode:
    """One run of an agent. Set `reward` before the end of its `async with`.

    If the block raises, the episode fails (`agent_error`), and the exception is raised again.

    Attributes:
        reward: The episode's reward, a finite number; or one for each policy, by name.
        output: Output of the agent, for readers of the trajectory.
        metrics: Numbers to record with the episode, by name.
        base_url: Base URL of the episode's OpenAI-compatible API, once it is open.
        api_key: Key of the episode.
        model: Name of the model.
    """

    def __init__(self, group: ClientGroup, metadata: dict[str, Any]) -> None:
        self.reward: float | Mapping[str, float] | None = None
        self.output: str | None = None
        self.metrics: dict[str, float] = {}
        self.base_url = self.api_key = self.model = self._id = self._finish_key = ""
        self._group = group
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        row = await self._group._open_episode(self._metadata)
        self._id, self.model = row["episode"], row["model"]
        self.base_url, self.api_key, self._finish_key = row["base_url"], row["api_key"], row["finish_key"]
        return self

    def openai(self) -> AsyncOpenAI:
        """Returns an OpenAI client of the episode. All episodes of a `Client` share its connections.

        Its calls are repeated for about `timeout_s` of the `Client`, so that a restart of the run fails none.
        """
        retries = FIRST_RETRIES + math.ceil(self._group._http.timeout_s / RETRY_S)
        return self._group._http.openai().with_options(
            base_url=self.base_url, api_key=self.api_key, max_retries=retries
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            failure = {"outcome": "agent_error", "error": f"{type(error).__name__}: {error}"}
            await leave(self._finish(failure))
            return
        try:
            reward = finite_reward(self.reward)
            metrics = {name: finite(f"the metric {name!r}", value) for name, value in self.metrics.items()}
        except RewardError as wrong:
            await self._finish({"outcome": "agent_error", "error": str(wrong)})
            raise ValueError(
                f"{wrong}: set episode.reward, and each of episode.metrics, before the end of its block"
            ) from None
        await self._finish({"reward": reward, "output": self.output, "metrics": metrics})

    async def _finish(self, report: dict[str, Any]) -> None:
        group, path = self._group, f"/s/{self._id}/finish"
        row: dict[str, Any] = {}
        while "outcome" not in row:
            row = await group._http.call("POST", path, report, self._finish_key)
        if row["outcome"] in ("completed", "truncated"):
            group._finished.append(self._id)
        else:
            group.failures.append(f"{row['outcome']}: {row['error']}")


async def leave(call: Coroutine[Any, Any, object]) -> None:
    """Report a failure to the gateway within a few seconds; otherwise the deadline ends the episode."""
    with contextlib.suppress(TimeoutError, GatewayError):
        async with asyncio.timeout(LEAVE_S):
            await call
