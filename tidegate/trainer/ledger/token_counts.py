"""Counts of the tokens sampled for training: trained on, or wasted, by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.trainer.ledger.entries import State
from tidegate.types import Trajectory

CAUSES = (State.STALE, State.FILTERED, State.FAILED, State.CANCELLED)


@dataclass(slots=True)
class TokenCounts:
    """Counts since the run was started or resumed. Aborted replies are never received and not counted."""

    used: int = 0
    wasted: Counter[State] = field(default_factory=Counter)
    episodes: Counter[State] = field(default_factory=Counter)
    """Episodes of the wasted tokens."""

    def record_used(self, trajectories: Iterable[Trajectory]) -> None:
        self.used += sum(trajectory.sampled_tokens() for trajectory in trajectories)

    def record_wasted(self, number: int, cause: State, episodes: int) -> None:
        """Count `number` tokens as wasted; `cause` is how the attempt or its group ended."""
        self.wasted[cause] += number
        self.episodes[cause] += episodes

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics.

        `used_ratio` is the share of trained episodes in the sampled tokens of ended attempts.
        `selection/<cause>_length` is the mean sampled length of the wasted episodes, to be compared with that
        of trained ones.
        """
        ended = self.used + self.wasted.total()
        return {
            "tokens/used_total": float(self.used),
            **{f"tokens/wasted_{cause}": float(self.wasted[cause]) for cause in CAUSES},
            **({"tokens/used_ratio": self.used / ended} if ended else {}),
            **{
                f"selection/{cause}_length": self.wasted[cause] / number
                for cause in (State.STALE, State.FAILED)
                if (number := self.episodes[cause])
            },
        }
