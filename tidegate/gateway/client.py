"""Client of the gateway's control plane, as used by the trainer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import quote

from tidegate.errors import GatewayError
from tidegate.gateway.control_calls import ControlCalls
from tidegate.gateway.errors import UNRANKED
from tidegate.gateway.ids import agents_key
from tidegate.types import Group, Outcome, Sampling, Split, Task, Trajectory, fields_of, from_wire

ADMIN_KEY = "TIDEGATE_ADMIN_KEY"
"""Name of the environment variable that holds a gateway's admin key."""
WORKER_KEY = "TIDEGATE_WORKER_KEY"
"""Name of the environment variable that holds the key with which workers take attempts."""
PROTOCOL = 1
"""Version of the lease protocol (docs/own_loop.md)."""
CALL_S = 30.0
FINISH_S = 60.0
"""Seconds that a `finish` request may take. After half of them without a reward it is sent again."""


@dataclass(frozen=True, slots=True)
class SessionAccess:
    """Address and key with which an agent calls its session.

    Attributes:
        session_id: Id of the session.
        base_url: Base URL of the session's OpenAI-compatible API.
        api_key: Secret key of the session.
    """

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Summary of a finished session.

    Attributes:
        session_id: Id of the session.
        outcome: How the session ended.
        reward: Its reward; None unless the outcome is trainable.
        reward_parts: Parts of the reward, by name.
        agent_reward: Reward returned by the agent itself, if any.
        turns: Number of recorded turns.
        sampled_tokens: Number of sampled tokens.
        oldest_version: Oldest policy version among them; None if unknown for a token, or without turns.
        error: Description of the error, if there was one.
        seconds: Duration of the session in seconds.
        engine_wait_s: Seconds for which its last call had waited for engines that serve, if it ended as
            `timeout` for that reason; else 0.
        policy_rewards: Reward of each policy that has one of its own.
    """

    session_id: str
    outcome: Outcome
    reward: float | None
    reward_parts: dict[str, float]
    agent_reward: float | None
    turns: int
    sampled_tokens: int
    oldest_version: int | None
    _: KW_ONLY
    error: str | None
    seconds: float
    engine_wait_s: float = 0.0
    policy_rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in a listing; `state` is `live`, `ready` or `leased`, `sessions` are ids."""

    id: str
    state: str
    oldest_version: int | None
    sessions: list[str]
    _: KW_ONLY
    unended: int = 0
    """Number of its sessions that have not ended."""
    newest_version: int | None = None
    """Newest policy version of a group that is ready or leased."""
    reward: float | None = None
    """Mean reward of such a group's episodes."""
    client: str | None = None
    """Name of the project key that began a live group; None if none did."""
    outcome: str | None = None
    """How a client's conversation has ended without a reward; None if it has not."""


class GatewayClient(ControlCalls):
    """Calls the control plane of one gateway.

    Every call has a deadline, until which it is repeated with backoff. Close the client with `close` or
    `async with`. All methods raise GatewayError if the gateway cannot be reached or refuses the call; its
    `status` is the HTTP status, if there is one.

    Args:
        url: Address of the gateway.
        admin_key: The gateway's admin key, if it has one.
        call_s: Deadline of a call in seconds.
    """

    def __init__(self, url: str, admin_key: str | None = None, call_s: float = CALL_S) -> None:
        super().__init__(url, admin_key, call_s)
        self.agents_key = agents_key(admin_key)
        """Key with which the trainer's own agents take attempts."""

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
        offer_heartbeat_s: float | None = None,
        candidate: bool = False,
    ) -> SessionAccess:
        """Opens a session.

        Args:
            task: Task of the episode.
            env: Name of the environment; by default the task's.
            group_id: Group to which the session belongs.
            slot: Slot of the group.
            split: `train` or `eval`; in `train` the session's sampling overrides the agent's.
            sampling: Sampling parameters of the session.
            deadline_s: Seconds until the session ends; by default the gateway's setting.
            metadata: JSON object that is stored with the trajectory.
            seed: Seed from which each turn's sampling seed is derived.
            limits: Limits of the session: `turns`, `tokens`, `seconds`, `tool_calls`, `calls` (at a time).
            untrained_models: Model names whose calls are recorded and not trained on.
            epoch: Epoch of the calling trainer; a newer trainer cancels the session.
            offer_heartbeat_s: Offers the session to workers, which send heartbeats at this interval; 0: to
                the trainer's own agents, which send none. Its deadline then starts, with a new key, when a
                worker takes it.
            candidate: Whether to sample from the candidate version while there is one.

        Returns:
            Address and key of the session.

        Raises:
            GatewayError: status 410 if a newer trainer took over or the group accepts no more sessions.
        """
        body = {
            "task": None if task is None else task.to_wire(),
            "env": env,
            "group_id": group_id,
            "slot": slot,
            "split": split,
            "sampling": fields_of(sampling or Sampling()),
            "deadline_s": deadline_s,
            "metadata": dict(metadata or {}),
            "seed": seed,
            "limits": dict(limits or {}),
            "untrained_models": list(untrained_models),
            "trainer_epoch": epoch,
            "offer_heartbeat_s": offer_heartbeat_s,
            "candidate": candidate,
            "key": secrets.token_urlsafe(24),  # so that a repeated request opens no second session
        }
        return SessionAccess(**await self._json("POST", "/sessions", body))

    async def finish(
        self,
        session_id: str,
        *,
        output: str | None = None,
        outcome: Outcome | str | None = None,
        reward: float | Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
        epoch: int | None = None,
        timeout_s: float = FINISH_S,
    ) -> SessionSummary:
        """Ends a session and waits for its reward.

        Args:
            session_id: Id of the session.
            output: The agent's output.
            outcome: The reported outcome; by default the gateway decides.
            reward: Reward returned by the agent, or of each policy by its name.
            metrics: Metrics of the episode, by name.
            error: Description of the error, if there was one.
            epoch: Epoch of the calling trainer.
            timeout_s: Seconds without a response after which the call fails. Waiting for a slow reward does
                not count.

        Raises:
            GatewayError: status 404 if the session does not exist, 410 if a newer trainer took over.
        """
        body = {
            "output": output,
            "outcome": None if outcome is None else str(outcome),
            "reward": dict(reward) if isinstance(reward, Mapping) else reward,
            "metrics": dict(metrics or {}),
            "error": error,
            "trainer_epoch": epoch,
            "wait_s": timeout_s / 2,
        }
        row: dict[str, Any] = {}
        while "outcome" not in row:  # its reward is still being computed
            row = await self._json("POST", f"/sessions/{_quote(session_id)}/finish", body, timeout_s)
        return _summary(row)

    async def result(self, session_id: str) -> SessionSummary:
        """Waits for the end of an offered session, however long. Raises GatewayError (404) if deleted."""
        row: dict[str, Any] = {}
        path = f"/sessions/{_quote(session_id)}/result?wait_s={FINISH_S / 2}"
        while "outcome" not in row:
            row = await self._json("GET", path, timeout_s=FINISH_S)
        return _summary(row)

    async def leave(self, worker: str) -> int:
        """Ends the attempts of a worker that has exited; returns how many of its agents had returned.

        The client's key must be a worker key.
        """
        return int((await self._json("POST", "/attempts/leave", {"worker": worker}))["returned"])

    async def attempts(self) -> dict[str, Any]:
        """Returns the number of `queued` attempts, and the `workers`."""
        rows: dict[str, Any] = await self._json("GET", "/attempts")
        return rows

    async def post_reward(
        self, session_id: str, value: float, name: str = "reward", turn: int | None = None
    ) -> None:
        """Posts a part of a running session's reward, or of the reward of the turn with index `turn`."""
        body = {"value": value, "name": name, "turn": turn}
        await self._json("POST", f"/sessions/{_quote(session_id)}/reward", body)

    async def trajectory(self, session_id: str) -> Trajectory:
        """Returns a finished session's trajectory."""
        data = await self._call("GET", f"/sessions/{_quote(session_id)}/trajectory")
        return from_wire(data, Trajectory)

    async def reported(self, session_id: str) -> Outcome | None:
        """Returns the outcome that a finished session's agent reported; None if it reported none."""
        outcome = (await self._json("GET", f"/sessions/{_quote(session_id)}"))["reported"]
        return None if outcome is None else Outcome(outcome)

    async def delete_session(self, session_id: str) -> None:
        """Aborts and deletes a session. Idempotent."""
        await self._call("DELETE", f"/sessions/{_quote(session_id)}")

    # -- groups ----------------------------------------------------------------------------------

    async def seal_group(
        self, group_id: str, task_id: str, sessions: Sequence[str], epoch: int | None = None
    ) -> str | None:
        """Makes a group of finished sessions ready to be leased, after its ranking, if a judge ranks it.

        Idempotent. Raises 410 as `finish`.

        Returns:
            Why it cannot be ranked; None if it is ready.
        """
        body = {
            "task_id": task_id, "sessions": list(sessions), "trainer_epoch": epoch, "wait_s": FINISH_S / 2,
        }  # fmt: skip
        try:
            while not (await self._json("POST", f"/groups/{_quote(group_id)}/seal", body, FINISH_S))[
                "sealed"
            ]:
                pass
        except GatewayError as error:
            if error.status != UNRANKED:
                raise
            return str(error)
        return None

    async def drop_group(
        self, group_id: str, epoch: int | None = None, why: str | None = None
    ) -> list[Trajectory]:
        """Ends a group and all of its sessions, including running ones. Idempotent. Raises 410 as `finish`.

        Args:
            group_id: Name of the group.
            epoch: The trainer's epoch.
            why: Reason, for a client that formed the group.

        Returns:
            The sessions' trajectories with the complete replies recorded so far; empty if repeated.
        """
        data = await self._call("DELETE", f"/groups/{_quote(group_id)}", {"trainer_epoch": epoch, "why": why})
        return from_wire(data, dict[str, list[Trajectory]])["trajectories"]

    async def list_groups(self) -> list[GroupRow]:
        return [GroupRow(**row) for row in (await self._json("GET", "/groups"))["groups"]]

    async def erased_groups(self) -> list[str]:
        """Returns the ids of the groups that clients erased, at least all unacknowledged ones."""
        return list((await self._json("GET", "/groups/erased"))["groups"])

    async def acknowledge_erasures(self, groups: Sequence[str]) -> None:
        """Tells the gateway that the run's files have these groups no more."""
        await self._json("POST", "/groups/erased", {"groups": list(groups)})

    async def end_run(self, epoch: int, why: str) -> None:
        """Tells the clients that wait for groups that the run has ended, within seconds."""
        await self._json("POST", "/groups/end", {"trainer_epoch": epoch, "why": why})

    async def begin_epoch(self, epoch: int) -> None:
        """Announces a trainer: leases of older trainers are released and their sessions cancelled.

        Any call with a new epoch has the same effect. Raises GatewayError (410) if a newer trainer took over.
        """
        await self.lease(epoch, 0)

    async def lease(self, epoch: int, max: int, wait_s: float = 0.0) -> list[Group]:
        """Leases up to `max` ready groups, waiting up to `wait_s` seconds for the first one.

        Raises GatewayError (410) if a newer trainer took over.
        """
        # A repeated request with the same key gets the response that was lost.
        body = {
            "trainer_epoch": epoch, "max": max, "wait_s": wait_s, "key": secrets.token_hex(8),
            "protocol": PROTOCOL,
        }  # fmt: skip
        data = await self._call("POST", "/groups/lease", body, timeout_s=self._call_s + wait_s)
        return from_wire(data, dict[str, list[Group]])["groups"]

    async def ack(self, epoch: int, lease_id: str, outcome: str, why: str | None = None) -> None:
        """Ends a lease, and with it the group; `why` is for the group's client. Idempotent."""
        body = {"trainer_epoch": epoch, "lease_id": lease_id, "outcome": str(outcome), "why": why}
        await self._json("POST", "/groups/ack", body)

    # -- engines, health -------------------------------------------------------------------------

    async def add_engine(
        self, url: str, control: Sequence[str] = (), *, admitted: bool | None = None, policy: str = ""
    ) -> dict[str, Any]:
        """Adds an engine. Idempotent.

        Args:
            url: Address of the engine or router.
            control: Addresses of the engines behind a router.
            admitted: For trainers: whether the engine has the current version and receives calls. Once it was
                given, engines that are added without it wait to be admitted.
            policy: Name of the policy that it serves; of several that share it, the first one.

        Returns:
            The engine as listed by `list_engines`.
        """
        body = {"url": url, "control": list(control), "admitted": admitted, "policy": policy}
        row: dict[str, Any] = await self._json("POST", "/engines", body)
        return row

    async def admit_engine(self, url: str, admitted: bool) -> None:
        """For trainers: sets whether an engine receives calls. Raises GatewayError (404) if unknown."""
        await self._json("PATCH", "/engines", {"url": url, "admitted": admitted})

    async def set_candidate(self, urls: Sequence[str], share: float = 0.0) -> None:
        """For trainers: sets the engines with a version that is not promoted yet; none: there is none.

        They serve the sessions opened with `candidate`, a `share` of the new conversations, and no others.
        """
        await self._json("PUT", "/engines/candidate", {"engines": list(urls), "share": share})

    async def remove_engine(self, url: str) -> None:
        await self._json("DELETE", "/engines", {"url": url})

    async def list_engines(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._json("GET", "/engines"))["engines"]
        return rows

    async def health(self) -> dict[str, str]:
        """Returns `instance` and `status`. Raises GatewayError if the gateway is unhealthy."""
        row: dict[str, str] = await self._json("GET", "/health")
        return row

    async def metrics(self) -> str:
        """Returns the gateway's metrics in Prometheus text format."""
        return (await self._call("GET", "/metrics")).decode()


def _summary(row: dict[str, Any]) -> SessionSummary:
    return SessionSummary(**{**row, "outcome": Outcome(row["outcome"])})


def _quote(part: str) -> str:
    return quote(part, safe="")
