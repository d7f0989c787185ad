"""Losses as compositions: a ratio, a surrogate made of it, and an aggregation over tokens.

The default, for one optimiser step per batch, is −Σ sg[min(π_θ/μ, C)] · A · log π_θ ÷ N: REINFORCE with
the truncated importance weights of V-trace (Espeholt et al., IMPALA, 2018). μ is the probability that
the engine recorded, so one ratio corrects both the age of a token and the engine's numerics. Unlike a
clipped surrogate it never zeroes the gradient of a token.

Axes in names: b rows of a microbatch, n trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.policy.microbatch import Microbatch

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
Aggregation = Callable[[Sequence[TrainSequence]], tuple[list[float], float]]
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


# ---------------------------------------------------------------------- ratios


def token_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """log π_θ − log μ of each token."""
    return logprobs_n - batch.logprobs_n


def proximal_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """log π_θ − log π_old: relative to the policy at the start of the batch, not to the sampling policy."""
    return logprobs_n - batch.old_logprobs(logprobs_n)


def sequence_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """Σ log π_θ/μ over the row's trained tokens: every token has the ratio of the whole sequence."""
    return _by_row(token_ratio(logprobs_n, batch), batch)


def gspo_token_ratio(logprobs_n: Tensor, batch: Microbatch) -> Tensor:
    """Log of GSPO-token's ratio, sg[s] · π_θ ÷ sg[π_θ] with s = (π_θ(y)/μ(y))^(1/|y|) over the row's
    trained tokens (Zheng et al., Group Sequence Policy Optimization, 2025, §4.3).

    Every token has the value of the sequence's ratio and its own gradient, so that it is weighted by its own
    advantage. If all tokens of a row have the same advantage, the gradient equals GSPO's.
    """
    log_ratio_n = token_ratio(logprobs_n, batch).detach()
    mean_n = _by_row(log_ratio_n, batch) / _by_row(torch.ones_like(log_ratio_n), batch)
    return mean_n + logprobs_n - logprobs_n.detach()


def _by_row(value_n: Tensor, batch: Microbatch) -> Tensor:
    """Sum over each row's tokens, repeated for each token."""
    sums_b = value_n.new_zeros(len(batch.rows)).index_add(0, batch.row_n, value_n)
    return sums_b.index_select(0, batch.row_n)


# ---------------------------------------------------------------------- surrogates


def weighted(weight: Weight) -> Surrogate:
    """sg[weight(ratio)] · A · log π: REINFORCE's gradient times a constant."""

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        weight_n, clipped_n = weight(log_ratio_n.detach().exp())
        return weight_n * batch.advantages_n * logprobs_n, clipped_n

    return objective


def ppo_clip(low: float, high: float) -> Surrogate:
    """min(r·A, clip(r, 1 − low, 1 + high)·A) (Schulman et al., PPO, 2017); `high` > `low` is DAPO's
    clip-higher (Yu et al., 2025, §3.1). A token counts as clipped if the clip removes its gradient."""

    def objective(log_ratio_n: Tensor, _: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        ratio_n, advantages_n = log_ratio_n.exp(), batch.advantages_n
        free_n = ratio_n * advantages_n
        clipped_n = ratio_n.clamp(1.0 - low, 1.0 + high) * advantages_n
        return torch.minimum(free_n, clipped_n), clipped_n.detach() < free_n.detach()

    return objective


def corrected(weight: Weight, surrogate: Surrogate) -> Surrogate:
    """sg[weight(π_old/μ)] · surrogate: importance weights turn the engine's samples into samples of π_old
    (Hilton et al., Batch size-invariance for policy optimization, 2021; AReaL, 2025)."""

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        weight_n, truncated_n = weight((batch.old_logprobs(logprobs_n) - batch.logprobs_n).exp())
        objective_n, clipped_n = surrogate(log_ratio_n, logprobs_n, batch)
        return weight_n * objective_n, truncated_n | clipped_n

    return objective


def truncated(cap: float) -> Weight:
    """min(r, cap)."""
    return bounded(0.0, cap)


def bounded(lowest: float, highest: float) -> Weight:
    """clip(r, lowest, highest)."""
    return lambda ratio_n: (ratio_n.clamp(lowest, highest), (ratio_n < lowest) | (ratio_n > highest))


def masked(cap: float) -> Weight:
    """r up to cap, 0 above: drops tokens from which the policy has moved too far."""
    return lambda ratio_n: (torch.where(ratio_n > cap, 0.0, ratio_n), ratio_n > cap)


# ---------------------------------------------------------------------- aggregations


def token_mean(rows: Sequence[TrainSequence]) -> tuple[list[float], float]:
    """Weighs every trained token 1; N is the number of tokens (DAPO, §3.3)."""
    return [1.0] * len(rows), float(sum(row.trained for row in rows))


def sequence_mean(rows: Sequence[TrainSequence]) -> tuple[list[float], float]:
    """Weighs every trajectory 1, over all its rows; N is the number of trajectories."""
    tokens = _tokens_by_trajectory(rows)
    weights = [1.0 / tokens[row.session_id] if row.trained else 0.0 for row in rows]
    return weights, float(sum(1 for number in tokens.values() if number))


def sequence_sum(length: int) -> Aggregation:
    """Weighs every trained token 1; N is `length` per trajectory: Dr. GRPO's constant divisor, so that the
    tokens of long episodes weigh no less (Liu et al., 2025, §3.2)."""

    def aggregation(rows: Sequence[TrainSequence]) -> tuple[list[float], float]:
        _, trajectories = sequence_mean(rows)
        return [1.0] * len(rows), trajectories * length

    return aggregation


def _tokens_by_trajectory(rows: Sequence[TrainSequence]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.session_id] = tokens.get(row.session_id, 0) + row.trained
    return tokens


# ---------------------------------------------------------------------- KL penalty to a reference


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


# ---------------------------------------------------------------------- the losses by name

LOSSES: dict[str, Callable[[TrainerSettings], Loss]] = {
    "truncated": lambda s: Loss(token_ratio, weighted(truncated(s.importance_cap)), token_mean),
    "truncated_sequence": lambda s: Loss(sequence_ratio, weighted(truncated(s.importance_cap)), token_mean),
    "masked": lambda s: Loss(token_ratio, weighted(masked(s.importance_cap)), token_mean),
    "masked_sequence": lambda s: Loss(sequence_ratio, weighted(masked(s.importance_cap)), token_mean),
    "cispo": lambda s: Loss(token_ratio, weighted(bounded(*_ratio_bounds(s, 1.0, 4.0))), token_mean),
    "grpo": lambda s: Loss(token_ratio, ppo_clip(*_clip(s, 0.2, 0.2)), sequence_mean),
    "dr_grpo": lambda s: Loss(token_ratio, ppo_clip(*_clip(s, 0.2, 0.2)), sequence_sum(s.sequence_length)),
    "dapo": lambda s: Loss(token_ratio, ppo_clip(*_clip(s, 0.2, 0.28)), token_mean),
    "gspo": lambda s: Loss(gspo_token_ratio, ppo_clip(*_clip(s, 3e-4, 4e-4)), sequence_mean),
    "decoupled_ppo": lambda s: Loss(
        proximal_ratio, corrected(truncated(s.importance_cap), ppo_clip(*_clip(s, 0.2, 0.2))), token_mean
    ),
}
"""Values of `trainer.loss`; docs/losses.md has the formulas."""


def make_loss(settings: TrainerSettings) -> Loss:
    """Build the loss of the settings, with its KL penalty if any."""
    loss = LOSSES[settings.loss](settings)
    if not settings.kl_coefficient:
        return loss
    return replace(loss, penalty=reference_penalty(settings.kl_estimator, settings.kl_coefficient))


def _clip(settings: TrainerSettings, low: float, high: float) -> tuple[float, float]:
    """Clip range below and above 1: the settings' values, or the loss's defaults."""
    return (
        low if settings.clip_low is None else settings.clip_low,
        high if settings.clip_high is None else settings.clip_high,
    )


def _ratio_bounds(settings: TrainerSettings, low: float, high: float) -> tuple[float, float]:
    below, above = _clip(settings, low, high)
    return 1.0 - below, 1.0 + above


def token_logprobs(logits_nv: Tensor, targets_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log π of the targets and the entropy of their distributions: float32 [n], detached float32 [n].

    The distribution is softmax(logits ÷ temperature), from which the engine samples and reports logprobs.
    """
    logprobs_nv = torch.log_softmax(logits_nv.float() / temperatures_n[:, None], dim=-1)
    with torch.no_grad():
        entropy_n = torch.special.entr(logprobs_nv.exp()).sum(dim=-1)
    return logprobs_nv.gather(1, targets_n[:, None]).squeeze(1), entropy_n
