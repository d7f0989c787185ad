"""Results of a simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field

from tidegate.errors import TidegateError
from tidegate.simulation.engines import Clock, Pool
from tidegate.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over all steps except the first tenth, in which the pipeline fills."""

    steps: int
    seconds: float
    """Simulated time."""
    step_s: float
    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    prompt_tokens_per_s: float
    """New tokens of prompts."""
    turns_per_s: float
    sessions_per_s: float
    """Attempts that ended."""
    _: KW_ONLY
    groups_per_s: float
    """Groups that became ready."""
    goodput: float
    """Trained ÷ sampled tokens over the whole run."""
    staleness_mean: float
    """Mean staleness of the trained groups when their batch was assembled."""
    staleness_max: int
    engines_busy: float
    """Share of the engines' time with running requests."""
    trainer_waits: float
    """Share of the time that the trainer waited for a batch."""
    lost: dict[str, float]
    """Shares of the sampled tokens that were not trained on, by cause."""
    engines_lost: int


TOTALS = ("sampled", "trained", "waited_s", "prompt", "turns", "sessions", "groups")
"""Fields of `SimulationCounts` that `figures` takes from the first step that counts on."""


@dataclass(slots=True)
class SimulationCounts:
    """Counts during a simulation."""

    clock: Clock
    pools: Collection[Pool]
    begun: int = 0
    """First step that counts for the figures; 0 before that."""
    sampled: float = 0.0
    trained: float = 0.0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: Counter[int] = field(default_factory=Counter)
    waited_s: float = 0.0
    _: KW_ONLY
    prompt: float = 0.0
    turns: int = 0
    sessions: int = 0
    groups: int = 0
    _before: Mapping[str, float] = field(default_factory=Counter)
    """The totals when the first step that counts began."""

    def begin(self, step: int) -> None:
        self.begun = step
        self.staleness.clear()
        self._before = self._totals()

    def turn(self, prompt: float, tokens: float) -> None:
        self.turns += 1
        self.prompt += prompt
        self.sampled += tokens

    def batch(self, staleness: list[int], tokens: float) -> None:
        self.staleness.update(staleness)
        self.trained += tokens

    def figures(self, steps: int, scenario: Scenario) -> Figures:
        """Returns the figures; raises TidegateError if no group was trained on."""
        done = {name: total - self._before[name] for name, total in self._totals().items()}
        counted, groups, seconds = steps - self.begun, self.staleness.total(), done["seconds"]
        if counted <= 0 or seconds <= 0 or not groups:
            raise TidegateError(
                "the simulated run trained on nothing: all attempts fail, or all groups are filtered or stale"
            )
        return Figures(
            steps=counted,
            seconds=seconds,
            step_s=seconds / counted,
            trained_tokens_per_s=done["trained"] / seconds,
            sampled_tokens_per_s=done["sampled"] / seconds,
            prompt_tokens_per_s=done["prompt"] / seconds,
            turns_per_s=done["turns"] / seconds,
            sessions_per_s=done["sessions"] / seconds,
            groups_per_s=done["groups"] / seconds,
            goodput=self.trained / max(1.0, self.trained + sum(self.lost.values())),
            staleness_mean=sum(age * count for age, count in self.staleness.items()) / groups,
            staleness_max=max(self.staleness),
            engines_busy=done["busy_s"] / seconds / scenario.engine_count,
            trainer_waits=done["waited_s"] / seconds,
            lost={why: tokens / max(1.0, self.sampled) for why, tokens in sorted(self.lost.items())},
            engines_lost=sum(pool.lost for pool in self.pools),
        )

    def _totals(self) -> dict[str, float]:
        busy_s = sum(pool.busy_s() for pool in self.pools)
        return {
            "seconds": self.clock.now,
            "busy_s": busy_s,
            **{name: getattr(self, name) for name in TOTALS},
        }
