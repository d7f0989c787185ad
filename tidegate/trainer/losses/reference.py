"""The penalty for the distance to a reference model."""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.losses.loss import Penalty


def reference_penalty(estimator: str, coefficient: float) -> Penalty:
    """coefficient · KL(π_θ‖π_ref), by one of three estimators (Schulman, Approximating KL Divergence, 2020).

    With d = log π_θ − log π_ref of the sampled token:

    - `k1`, d: subtracted from the token's advantage, as a reward. (Differentiated, its expectation is 0.)
    - `k2`, d²/2: added to the loss; on policy its gradient is that of the KL, the same as k1's.
    - `k3`, exp(−d) − 1 + d: added to the loss, as GRPO does (Shao et al., DeepSeekMath, 2024, eq. 4).
    """

    def penalty(logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        assert batch.reference_n is not None, "rows have no reference logprobs"
        distance_n = logprobs_n - batch.reference_n
        zero_n = torch.zeros_like(distance_n)
        if estimator == "k1":
            return coefficient * distance_n.detach(), zero_n
        if estimator == "k2":
            return zero_n, coefficient * distance_n.square() / 2
        return zero_n, coefficient * (torch.expm1(-distance_n) + distance_n)

    return penalty
