"""Tests each version before it goes live, and returns the policy to the live one if it is worse.

    reserve a number → write → load on some engines → evaluate, or compare rewards → go live | roll back

The live version stays on the other engines, so a candidate that is rolled back costs them nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient
from tidegate.settings.promotion import PromotionSettings
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.publish.canary import CanaryTest
from tidegate.trainer.publish.candidate_engines import CandidateEngines
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.sequential_test import Comparison
from tidegate.trainer.waits import wait_at_most

POLL_S = 1.0
EVALUATIONS = 3
"""Evaluations of a candidate before it is rolled back because too few of their episodes sampled from it."""
SERVED_S = 3600.0
"""Longest wait for engines that serve a candidate before its evaluation; it is rolled back then."""
BY_HAND = "a person decided so"


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a test; `promoted` is None if the run stopped before there was one."""

    promoted: bool | None
    why: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Promotion:
    """Publishes the versions that pass a test.

    Args:
        settings: `trainer.promotion`.
        admission: Admission of the run.
        publisher: Writes and loads weights.
        engines: Engines for the candidate.
        gateway: Client of the gateway.
        evaluate: Step, and the candidate's version or None for the live one → its held-out rewards.
        restore: Returns the policy and its optimiser to the live version.
        note: Receives messages.
        stop: Set when the run is to end; a test then ends without a result.
        requested: Returns the manual decision about the candidate: promote (True), roll back (False), or none
            so far (None).
        progress: Receives the version and the comparison so far of a canary, when they have changed.

    Attributes:
        active: Whether a candidate is tested.
        live_step: Step whose weights are live; None before the first result.
    """

    settings: PromotionSettings
    admission: Admission
    publisher: Publisher
    engines: CandidateEngines
    gateway: GatewayClient
    evaluate: Callable[[int, int | None], Awaitable[list[float]]]
    restore: Callable[[], Awaitable[object]]
    note: Callable[[str], None]
    stop: asyncio.Event
    requested: Callable[[], bool | None] = lambda: None
    progress: Callable[[int, Comparison], None] = lambda version, comparison: None
    active: bool = False
    live_step: int | None = None
    _live_rewards: list[float] = field(default_factory=list)

    async def publish(self, step: int) -> dict[str, float]:
        """Test the weights after `step`; they go live, or the policy returns to the live version.

        Returns:
            Metrics of the test.
        """
        began, live = time.monotonic(), self.admission.version
        version = self.admission.versions.reserve(step, candidate=True)
        weights = await self.publisher.write_candidate(version)
        self.active = True
        try:
            decision = await self._test(step, version, weights)
        finally:
            self.active = False
        if decision.promoted is False:  # first, as a checkpoint follows if the engines cannot be released
            await self.restore()
            self.admission.roll_back(version, live, step, decision.why, decision.figures)
        if decision.promoted:
            self.admission.versions.promote(version, step, decision.why, decision.figures)
            await self.publisher.publish_candidate(weights, version)
            await self.engines.release()
            self.admission.mark_live(version)
        else:
            await self.engines.release()
            await self.publisher.discard_candidate(weights)
        if decision.promoted is not None:
            # After a roll-back, too: the policy after this step is then the live one again.
            self.live_step = step
        self.note(_message(version, live, decision))
        return {
            "promotion/promoted": float(bool(decision.promoted)),
            "time/promotion": time.monotonic() - began,
            **{f"promotion/{name}": value for name, value in decision.figures.items()},
        }

    def set_live(self, step: int) -> None:
        """Take the weights after `step` for the live ones, which were not tested: a requested roll-back."""
        self.live_step, self._live_rewards = step, []

    async def _test(self, step: int, version: int, weights: Path) -> Decision:
        if self.settings.mode == "canary":
            decision = await self._canary(version, weights)
        else:
            decision = await self._evaluation(step, version, weights)
        return Decision(None, "the run stops") if decision is None else decision

    async def _evaluation(self, step: int, version: int, weights: Path) -> Decision | None:
        """Compare held-out rewards; None if the run stops."""
        if not self._live_rewards:
            self._live_rewards = await self.evaluate(step, None)
        live, margin = self._live_rewards, self.settings.margin
        if not live and not self.stop.is_set():
            return Decision(False, "no held-out episode of the live version had a reward")
        for _ in range(EVALUATIONS):
            if (decision := await self._wait_for_engines(version, weights)) is not None:
                return decision
            rewards = [] if self.stop.is_set() else await self.evaluate(step, version)
            if self.stop.is_set():
                return None
            # Failed episodes are missing: a mean of few would be compared with the mean of all.
            if rewards and 2 * len(rewards) >= len(live):
                break
        else:
            return Decision(False, f"{EVALUATIONS} evaluations had too few episodes with its tokens alone")
        means = [sum(values) / max(1, len(values)) for values in (rewards, live)]
        comparison = Comparison(means[0], means[1], len(rewards), len(live), 0.0, 0.0)
        decided, why = self.requested(), _why(comparison, margin)
        promoted = means[0] >= means[1] - margin if decided is None else decided
        if promoted:
            self._live_rewards = rewards
        return Decision(promoted, why if decided is None else f"{BY_HAND}: {why}", comparison.figures())

    async def _wait_for_engines(self, version: int, weights: Path) -> Decision | None:
        """Wait until engines serve the candidate, or the run stops; returns a decision that comes first."""
        limit = time.monotonic() + SERVED_S
        while not self.stop.is_set() and not await self._hold(version, weights):
            if (promoted := self.requested()) is not None:
                self._live_rewards = [] if promoted else self._live_rewards
                return Decision(promoted, f"{BY_HAND}, before engines served it")
            if time.monotonic() >= limit:
                return Decision(False, f"too few engines could serve it in {SERVED_S:g} s")
            await wait_at_most(self.stop, POLL_S)
        return None

    async def _canary(self, version: int, weights: Path) -> Decision | None:
        """Compare the rewards of clients' conversations; None if the run stops."""
        limit, margin = time.monotonic() + self.settings.max_wait_s, self.settings.margin
        test: CanaryTest | None = None
        told: Comparison | None = None
        while not self.stop.is_set():
            await self._hold(version, weights)
            with contextlib.suppress(GatewayError):  # a restarting gateway; repeated later
                groups = await self.gateway.list_groups()
                test = test or CanaryTest(version, {group.id for group in groups})
                test.add(groups)
            if test is not None:
                comparison = test.compare(margin)
                if comparison != told:
                    self.progress(version, comparison)
                told = comparison
                why, figures = _why(comparison, margin), comparison.figures()
                if (promoted := self.requested()) is not None:
                    return Decision(promoted, f"{BY_HAND}: {why}", figures)
                if (promoted := comparison.promotes(margin)) is not None:
                    return Decision(promoted, why, figures)
                if time.monotonic() >= limit:
                    return Decision(False, f"no result in {self.settings.max_wait_s:g} s: {why}", figures)
            await wait_at_most(self.stop, POLL_S)
        return None

    async def _hold(self, version: int, weights: Path) -> bool:
        """Have engines serve the candidate; returns whether all of them do."""
        try:
            return await self.engines.ensure_serving(weights, version)
        except GatewayError:  # a restarting gateway; repeated later
            return False


def _why(comparison: Comparison, margin: float) -> str:
    return (
        f"mean reward {comparison.reward:.3f} of {comparison.episodes} episodes, that of the live version "
        f"{comparison.live_reward:.3f} of {comparison.live_episodes}; margin {margin:g}"
    )


def _message(version: int, live: int, decision: Decision) -> str:
    if decision.promoted is None:
        return f"version {version} was not tested to the end: {decision.why}"
    how = "is live" if decision.promoted else f"is rolled back to {live}"
    return f"version {version} {how}: {decision.why}"
