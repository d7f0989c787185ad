"""Seals groups of finished sessions; a judge that ranks compares their episodes before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from tidegate.errors import GatewayError, RewardError
from tidegate.gateway.environments.base import EnvironmentService, EpisodeLostError
from tidegate.gateway.errors import UNRANKED
from tidegate.gateway.groups.rewards import retry_while_unavailable
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.journal.base import REMEMBERED
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.sessions.store import SessionStore
from tidegate.types import Group, Outcome, Scored, Trajectory

log = logging.getLogger("tidegate.gateway")


class GroupSealer:
    """Makes groups of finished sessions ready.

    Until a group is sealed, the rewards of its sessions have no part of a ranking. The ranked rewards are
    written with the seal, so that a crash leaves either none or all of them.
    """

    def __init__(
        self, environments: EnvironmentService | None, sessions: SessionStore, groups: GroupStore
    ) -> None:
        self._environments = environments
        self._sessions = sessions
        self._groups = groups
        self._rankings: dict[str, asyncio.Task[list[Scored]]] = {}
        """Rankings that run, or have ended while their group is not sealed."""

    async def seal(
        self, group_id: str, task_id: str, session_ids: Sequence[str], epoch: int | None, wait_s: float | None
    ) -> bool:
        """Makes a group ready. Idempotent.

        Args:
            group_id: The group.
            task_id: Its task.
            session_ids: Its sessions, in any order.
            epoch: Epoch of the trainer; None: the caller is none.
            wait_s: Longest wait for its ranking; None: until it has ended.

        Returns:
            False if it is still being ranked: the call is to be repeated.

        Raises:
            GatewayError: A session cannot be part of the group, or the judge failed (status UNRANKED).
        """
        if self._groups.end_reason(group_id) is not None:
            # Before the sessions are looked up: those of an ended group are deleted, and a 404 would hide
            # why it ended.
            await self._groups.seal(Group(group_id, task_id, []), epoch)  # raises
        if not session_ids:
            raise GatewayError(f"group {group_id} cannot be sealed without sessions", status=400)
        sessions = sorted((self._member(group_id, session_id) for session_id in session_ids), key=_slot)
        trajectories = [_finished(session) for session in sessions]
        scored = None
        if self._is_ranked(sessions[0]):
            ranking = self._rankings.get(group_id) or self._start(group_id, sessions)
            # The ranking goes on after `wait_s`, and a repeated call finds it.
            await asyncio.wait((ranking,), timeout=wait_s)
            if not ranking.done():
                return False
            scored = _result(group_id, ranking, trajectories)
            trajectories = [_with(*pair) for pair in zip(trajectories, scored, strict=True)]
        await self._groups.seal(Group(group_id, task_id, trajectories), epoch, ranked=scored is not None)
        for session, trajectory in zip(sessions, trajectories, strict=True):
            # After the journal has the ranked rewards: a failed seal is repeated, and must not add them
            # twice.
            session.trajectory = trajectory
        # Only now, as a repeated call of a failed seal needs the result again.
        self.forget(group_id)
        return True

    def forget(self, group_id: str) -> None:
        """Ends the ranking of a group that has ended."""
        ranking = self._rankings.pop(group_id, None)
        if ranking is not None:
            ranking.cancel()

    async def close(self) -> None:
        rankings = list(self._rankings.values())
        for ranking in rankings:
            ranking.cancel()
        await asyncio.gather(*rankings, return_exceptions=True)

    def _member(self, group_id: str, session_id: str) -> GatewaySession:
        session = self._sessions.get(session_id)
        if session is None:
            raise GatewayError(f"there is no session {session_id}", status=404)
        if session.trajectory is None or session.group_id != group_id:
            what = "not finished" if session.trajectory is None else f"of group {session.group_id!r}"
            raise GatewayError(f"session {session_id} is {what}", status=400)
        # A failed ranking took the rewards away; a repeated call must get the judge's failure and not
        # this refusal.
        unranked = session.trajectory.outcome is Outcome.REWARD_ERROR and group_id in self._rankings
        if session.trajectory.reward is None and not unranked:
            raise GatewayError(
                f"session {session_id} ended {session.trajectory.outcome}: it has no reward", status=400
            )
        return session

    def _is_ranked(self, session: GatewaySession) -> bool:
        info = None if self._environments is None else self._environments.info(session.env or "")
        return info is not None and info.ranked and session.task is not None

    def _start(self, group_id: str, sessions: Sequence[GatewaySession]) -> asyncio.Task[list[Scored]]:
        # Callers that never return would otherwise keep their groups' rankings for ever.
        if len(self._rankings) >= REMEMBERED:
            self.forget(next(iter(self._rankings)))
        ranking = asyncio.create_task(self._rank(group_id, sessions), name=f"ranking of {group_id}")
        ranking.add_done_callback(_retrieve)
        self._rankings[group_id] = ranking
        return ranking

    async def _rank(self, group_id: str, sessions: Sequence[GatewaySession]) -> list[Scored]:
        """Returns what the ranking adds to each session; waits for a judge that is unavailable.

        Raises RewardError or EpisodeLostError.
        """
        task, trajectories = sessions[0].task, [_finished(session) for session in sessions]
        assert self._environments is not None, "checked before"
        assert task is not None, "checked before"
        environments = self._environments
        scored = await retry_while_unavailable(
            lambda: environments.rank(group_id, task, trajectories), f"the ranking of group {group_id}"
        )
        if len(scored) != len(trajectories):
            raise RewardError(f"the judge ranked {len(scored)} episodes, not {len(trajectories)}")
        return scored


def _result(
    group_id: str, ranking: asyncio.Task[list[Scored]], trajectories: Sequence[Trajectory]
) -> list[Scored]:
    """Returns the result of a ranking that has ended; if it failed, so did all its episodes."""
    if ranking.cancelled():
        raise GatewayError(f"group {group_id} ended while it was ranked", status=410)
    error = ranking.exception()
    if error is None:
        return ranking.result()
    if not isinstance(error, RewardError | EpisodeLostError):
        raise error
    for number, trajectory in enumerate(trajectories):
        # The metrics count the judge's calls for the whole group: once, not once for each episode.
        if number == 0 and isinstance(error, RewardError) and trajectory.reward is not None:
            trajectory.metrics |= error.metrics
        trajectory.outcome, trajectory.error, trajectory.reward = Outcome.REWARD_ERROR, str(error), None
        trajectory.policy_rewards = {}
    raise GatewayError(f"group {group_id} could not be ranked: {error}", status=UNRANKED)


def _with(trajectory: Trajectory, scored: Scored) -> Trajectory:
    return replace(
        trajectory,
        reward=(trajectory.reward or 0.0) + scored.reward,
        reward_parts={**trajectory.reward_parts, **scored.parts},
        metrics={**trajectory.metrics, **scored.metrics},
        policy_rewards={name: value + scored.reward for name, value in trajectory.policy_rewards.items()},
    )


def _finished(session: GatewaySession) -> Trajectory:
    assert session.trajectory is not None, "checked before"
    return session.trajectory


def _slot(session: GatewaySession) -> int:
    slot = _finished(session).slot
    return -1 if slot is None else slot


def _retrieve(ranking: asyncio.Task[list[Scored]]) -> None:
    """Logs a failure, which the callers of `seal` read from the task."""
    with contextlib.suppress(asyncio.CancelledError):
        if (error := ranking.exception()) is not None:
            log.warning("%s failed: %s", ranking.get_name(), error)
