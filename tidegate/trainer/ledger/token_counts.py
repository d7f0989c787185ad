"""What became of the tokens that agents sampled for training: trained on, or wasted, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.trainer.ledger.entries import State
from tidegate.types import Trajectory

CAUSES = (State.STALE, State.FILTERED, State.FAILED, State.CANCELLED)


@dataclass(slots=True)
class TokenCounts:
    """Counts since the run was started or resumed. A reply that was aborted half-way was never received,
    and is not counted."""

    trained: int = 0
    wasted: Counter[State] = field(default_factory=Counter)
    episodes: Counter[State] = field(default_factory=Counter)
    """That the wasted ones were sampled in."""

    def train(self, trajectories: Iterable[Trajectory]) -> None:
        self.trained += sum(one.sampled_tokens() for one in trajectories)

    def waste(self, number: int, cause: State, episodes: int) -> None:
        """`cause` is how the attempt or its group ended."""
        self.wasted[cause] += number
        self.episodes[cause] += episodes

    def metrics(self) -> dict[str, float]:
        """`goodput` is the trained share of what was sampled and has ended; the lengths are how far an
        episode had come on average, to be compared with those trained on."""
        ended = self.trained + self.wasted.total()
        return {
            "tokens/trained_total": float(self.trained),
            **{f"tokens/wasted_{cause}": float(self.wasted[cause]) for cause in CAUSES},
            **({"tokens/goodput": self.trained / ended} if ended else {}),
            **{
                f"selection/{cause}_length": self.wasted[cause] / number
                for cause in (State.STALE, State.FAILED)
                if (number := self.episodes[cause])
            },
        }
