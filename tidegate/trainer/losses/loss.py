"""A loss: a ratio, a surrogate made of it, and an aggregation over tokens.

Axes in names: b rows of a microbatch, n trained tokens. μ is the probability that the engine recorded when it
sampled a token; π_θ is the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.batch.rows import TrainingSequence

Ratio = Callable[[Tensor, Microbatch], Tensor]
"""(log π_n, microbatch) → log importance ratio of each token, [n]."""
Surrogate = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, Tensor]]
"""(log ratio_n, log π_n, microbatch) → objective of each token, to be maximised, and whether its ratio was
clipped: ([n], bool [n])."""
Weight = Callable[[Tensor], tuple[Tensor, Tensor]]
"""ratio_n → constant weight of each token, and whether it differs from the ratio: ([n], bool [n])."""
Penalty = Callable[[Tensor, Microbatch], tuple[Tensor, Tensor]]
"""(log π_n, microbatch) → constant to subtract from each token's advantage, and term to add to its loss,
both [n]."""
Aggregation = Callable[[Sequence[TrainingSequence]], tuple[list[float], float]]
"""All rows of an optimiser step → weight of a token in each row, and the divisor N of the sum."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, composed of its parts. `aggregation` is called once per optimiser step, with all its rows."""

    ratio: Ratio
    surrogate: Surrogate
    aggregation: Aggregation
    penalty: Penalty | None = None

    def __call__(self, logprobs_n: Tensor, batch: Microbatch, denominator: float) -> tuple[Tensor, Tensor]:
        """Compute a microbatch's share of the loss, −Σ weight · surrogate ÷ N.

        Returns:
            The scalar loss, and whether each token's ratio was clipped, bool [n].
        """
        added_n: Tensor | float = 0.0
        if self.penalty is not None:
            lowered_n, added_n = self.penalty(logprobs_n, batch)
            batch = replace(batch, advantages_n=batch.advantages_n - lowered_n)
        objective_n, clipped_n = self.surrogate(self.ratio(logprobs_n, batch), logprobs_n, batch)
        return (batch.weights_n * (added_n - objective_n)).sum() / denominator, clipped_n
