"""The simulated run: agents, gateway and trainer around the admission core that real runs use.

Events are ordered as in `trainer/rollout` and `trainer/loop`: groups start while admission allows it, ready
groups are leased only while the trainer waits for a batch, and a publish first ends the groups that it would
make too stale, then pauses the engines.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

from tidegate.simulation.engines import Clock, Pool, SimulatedEngine, SimulatedRequest
from tidegate.simulation.outcome import Figures, SimulationCounts
from tidegate.simulation.scenario import Scenario, SimulatedTurn
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import AttemptDecision
from tidegate.trainer.admission.state import Phase
from tidegate.types import Outcome

BACKOFF_S = 0.5


@dataclass(eq=False, slots=True)
class SimulatedAttempt:
    """One running episode."""

    id: str
    group: str
    slot: int
    turns: Sequence[SimulatedTurn]
    failing: bool
    _: KW_ONLY
    engines: dict[str, SimulatedEngine] = field(default_factory=dict)
    """The engine of its requests to each policy, assigned at the first one."""
    at: int = 0
    sampled: float = 0.0
    frozen: float = 0.0
    """Tokens that a frozen policy sampled."""
    oldest: int | None = None
    request: SimulatedRequest | None = None


class SimulatedRun:
    """`run()` simulates the scenario's steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self._rng = random.Random(scenario.seed)
        self._core = Admission(scenario.admission_rules(), lambda _: None)
        self._pools = {name: Pool(self.clock, model, self._rng) for name, model in scenario.engines.items()}
        self._counts = SimulationCounts(self.clock, self._pools.values())
        self._attempts: dict[str, dict[str, SimulatedAttempt]] = {}
        """Running and successful attempts of each running or ready group, by group and attempt id."""
        self._delayed: deque[tuple[str, int]] = deque()
        """Groups and slots whose next attempt waits, as the engines are too slow for more."""
        self._ready: deque[str] = deque()
        self._waiting = True
        self._waits_since = 0.0
        self._step = 0

    def run(self) -> Figures:
        warm = max(1, self.scenario.steps // 10)
        self._start_groups()
        while (
            self._step < self.scenario.steps
            and not self._core.streaks.no_progress_reason()
            and self.clock.step()
        ):
            if self._step == warm and not self._counts.begun:
                self._counts.begin(warm)
        return self._counts.figures(self._step, self.scenario)

    # -- agents ----------------------------------------------------------------------------------

    def _start_groups(self) -> None:
        while self._core.blocked_by() is None:
            ticket = self._core.cursor.next()
            group = self._core.start_group(ticket, f"t{ticket.index}")
            if group is None:
                continue
            self._attempts[group.id] = {}
            for slot in range(len(group.slots)):
                self._start_attempt(group.id, slot)

    def _start_attempt(self, group: str, slot: int) -> None:
        if not self._core.may_attempt():
            self._delayed.append((group, slot))
            return
        model = self.scenario.agent
        attempt = SimulatedAttempt(
            self._core.start_attempt(group, slot), group, slot,
            model.draw(self._rng, self.scenario.policies),
            self._rng.random() < model.failed,
        )  # fmt: skip
        self._attempts[group][attempt.id] = attempt
        if model.deadline_s < math.inf:
            self.clock.after(model.deadline_s, lambda: self._time_out(attempt))
        if (setup := attempt.turns[0].before_s) > 0:
            self.clock.after(setup, lambda: self._request_reply(attempt))
        else:
            self._request_reply(attempt)

    def _request_reply(self, attempt: SimulatedAttempt) -> None:
        if attempt.id not in self._attempts.get(attempt.group, ()):
            return  # the group ended meanwhile
        turn = attempt.turns[attempt.at]

        def begun() -> None:
            if attempt.oldest is None and turn.trained:
                attempt.oldest = self._core.version

        def done() -> None:
            attempt.request = None
            attempt.sampled += turn.tokens
            attempt.frozen += 0.0 if turn.trained else turn.tokens
            self._counts.turn(turn.prompt, turn.tokens)
            self.clock.after(turn.away_s, lambda: self._next_turn(attempt))

        attempt.request = SimulatedRequest(turn.prompt, turn.tokens, done, begun)
        engine = attempt.engines.get(turn.policy)
        if engine is None or not engine.up:
            engine = attempt.engines[turn.policy] = self._pools[turn.policy].assign()
        engine.add(attempt.request)

    def _next_turn(self, attempt: SimulatedAttempt) -> None:
        if attempt.id not in self._attempts.get(attempt.group, ()):
            return
        attempt.at += 1
        if attempt.at < len(attempt.turns):
            self._request_reply(attempt)
        else:
            self._end(attempt)

    def _time_out(self, attempt: SimulatedAttempt) -> None:
        group = self._core.groups.get(attempt.group)
        if group is None or not group.slots or group.slots[attempt.slot].running != attempt.id:
            return
        self._core.pace.measured(sum(engine.rate for pool in self._pools.values() for engine in pool.engines))
        if attempt.request is not None and attempt.request.engine is not None:
            attempt.request.engine.cancel(attempt.request)
            attempt.sampled += attempt.request.sampled
            self._counts.sampled += attempt.request.sampled
            attempt.request = None
        self._end(attempt, slow=True)

    def _end(self, attempt: SimulatedAttempt, *, slow: bool = False) -> None:
        outcome = Outcome.AGENT_ERROR if attempt.failing else Outcome.COMPLETED
        outcome = Outcome.TIMEOUT if slow else outcome
        self._counts.sessions += 1
        decision = self._core.end_attempt(attempt.id, outcome, slow=slow, tokens=attempt.sampled)
        while self._delayed and self._core.may_attempt():
            self._retry(*self._delayed.popleft())
        if not outcome.trainable:
            self._counts.lost["failed"] += attempt.sampled
            del self._attempts[attempt.group][attempt.id]
        if decision is AttemptDecision.RETRY:
            self.clock.after(BACKOFF_S, lambda: self._retry(attempt.group, attempt.slot))
        elif decision is AttemptDecision.FAILED:
            self._discard(attempt.group, "failed")
            self._start_groups()
        else:
            if decision is AttemptDecision.READY:
                self._counts.groups += 1
                self._ready.append(attempt.group)
                if self._waiting:
                    self._gather()
            self._start_groups()  # a slot is free

    def _retry(self, group: str, slot: int) -> None:
        if group in self._attempts and group in self._core.groups:
            self._start_attempt(group, slot)

    def _discard(self, group: str, why: str) -> list[SimulatedAttempt]:
        """Aborts the group's running attempts, and counts its sampled tokens as lost to `why`."""
        attempts = list(self._attempts.pop(group).values())
        for attempt in attempts:
            if attempt.request is not None and attempt.request.engine is not None:
                attempt.request.engine.cancel(attempt.request)
                self._counts.sampled += attempt.request.sampled
                attempt.sampled += attempt.request.sampled
            self._counts.lost[why] += attempt.sampled
        return attempts

    # -- the trainer -----------------------------------------------------------------------------

    def _gather(self) -> None:
        """Leases and filters ready groups and assembles a batch, as `trainer/batch` does."""
        while self._ready:
            group = self._ready.popleft()
            if group not in self._core.groups:
                continue
            attempts = self._core.groups[group].successful_attempts()
            oldest = [self._attempts[group][attempt].oldest for attempt in attempts]
            self._core.lease(group, min((version for version in oldest if version is not None), default=None))
            nothing = all(version is None for version in oldest)
            if nothing or self._rng.random() < self.scenario.agent.alike:
                self._core.filter_group(group)
                self._discard(group, "filtered")
        for group in self._core.end_stale_groups():
            self._discard(group, "stale")
        groups = self._core.select_batch()
        if groups is not None:
            self._waiting = False
            self._counts.waited_s += self.clock.now - self._waits_since
            self._train(groups)
        self._start_groups()

    def _train(self, groups: Sequence[str]) -> None:
        attempts = [one for group in groups for one in self._attempts.pop(group).values()]
        tokens = sum(one.sampled - one.frozen for one in attempts)
        if frozen := sum(one.frozen for one in attempts):
            self._counts.lost["frozen"] += frozen
        model = self.scenario.trainer
        self._counts.batch([self._core.groups[group].staleness for group in groups], tokens)
        self.clock.after(
            model.step_s + tokens * model.token_s / model.count, lambda: self._on_step_done(groups)
        )

    def _on_step_done(self, groups: Sequence[str]) -> None:
        self._step += 1
        self._core.step(groups, self._step)
        self._core.commit()
        if self._step % self.scenario.rules.publish_interval:
            self._wait_again()
        else:
            self._publish(self._core.versions.reserve(self._step))

    def _publish(self, version: int) -> None:
        sampled = {
            group: min((one.oldest for one in attempts.values() if one.oldest is not None), default=None)
            for group, attempts in self._attempts.items()
            if self._core.groups[group].phase in (Phase.RUNNING, Phase.READY)
        }
        for group in self._core.will_be_stale(version, sampled):
            self._core.end_stale(group, version, sampled[group])
            self._discard(group, "stale")
        self._start_groups()
        for pool in self._published:
            pool.pause()
        self.clock.after(self.scenario.trainer.publish_s, lambda: self._on_published(version))

    @property
    def _published(self) -> list[Pool]:
        frozen = [name for name, policy in self.scenario.policies.items() if not policy.train]
        return [pool for name, pool in self._pools.items() if name not in frozen]

    def _on_published(self, version: int) -> None:
        self._core.mark_live(version)
        for pool in self._published:
            pool.resume()
        self._start_groups()
        self._wait_again()

    def _wait_again(self) -> None:
        def wait() -> None:
            self._waiting, self._waits_since = True, self.clock.now
            self._gather()

        self.clock.after(self.scenario.trainer.between_s, wait)
