"""The parts that losses are made of: ratios, surrogates, aggregations, and the penalties of a reference model
and of a teacher.

Axes in names: b rows of a microbatch, n trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.losses.loss import Aggregation, Penalty, Surrogate, Weight

SMALLEST_REST = 1e-6
"""Smallest probability of all ids together that a teacher does not list: float32 sums are no more exact."""

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


def _by_row(value_n: Tensor, batch: Microbatch) -> Tensor:
    """Sum over each row's tokens, repeated for each token."""
    sums_b = value_n.new_zeros(len(batch.rows)).index_add(0, batch.row_n, value_n)
    return sums_b.index_select(0, batch.row_n)


def row_mean(value_n: Tensor, batch: Microbatch) -> Tensor:
    """Mean over each row's tokens, repeated for each token."""
    return _by_row(value_n, batch) / _by_row(torch.ones_like(value_n), batch)


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


def dual_clipped(bound: float, surrogate: Surrogate) -> Surrogate:
    """surrogate(min(r, bound)) where A < 0; with PPO's it equals max(surrogate(r), bound·A): dual clipping
    (Ye et al., Mastering Complex Control in MOBA Games, arXiv 1912.09729, 2020). Without a bound, the
    gradient of a token with a negative advantage grows with its ratio without limit."""
    log_bound = math.log(bound)

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        bounded_n = (batch.advantages_n < 0) & (log_ratio_n.detach() > log_bound)
        # Bounded as a logarithm: the exponential of a large one is infinite, and its gradient NaN.
        objective_n, clipped_n = surrogate(log_ratio_n.masked_fill(bounded_n, log_bound), logprobs_n, batch)
        return objective_n, clipped_n | bounded_n

    return objective


def sequence_masked(threshold: float | None, surrogate: Surrogate) -> Surrogate:
    """0 for tokens with A < 0 in a row whose mean log μ/π_θ exceeds the threshold, else the surrogate:
    off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, 2025, §3.1). None: no row is masked."""
    if threshold is None:
        return surrogate

    def objective(log_ratio_n: Tensor, logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        distance_n = -row_mean(token_ratio(logprobs_n.detach(), batch), batch)
        masked_n = (batch.advantages_n < 0) & (distance_n > threshold)
        objective_n, clipped_n = surrogate(log_ratio_n, logprobs_n, batch)
        return objective_n.masked_fill(masked_n, 0.0), clipped_n | masked_n

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
    """Returns the weight r ↦ min(r, cap)."""
    return bounded(0.0, cap)


def bounded(lowest: float, highest: float) -> Weight:
    """Returns the weight r ↦ clip(r, lowest, highest)."""
    return lambda ratio_n: (ratio_n.clamp(lowest, highest), (ratio_n < lowest) | (ratio_n > highest))


def masked(cap: float) -> Weight:
    """Returns the weight r ↦ r up to cap, 0 above: no gradient for tokens whose ratio exceeds the cap."""
    # Not a product with 0, which is NaN for an infinite ratio.
    return lambda ratio_n: (torch.where(ratio_n > cap, 0.0, ratio_n), ratio_n > cap)


# ---------------------------------------------------------------------- aggregations


def token_mean(rows: Sequence[TrainingSequence]) -> tuple[list[float], float]:
    """Weighs every trained token 1; N is the number of tokens (DAPO, §3.3)."""
    return [1.0] * len(rows), float(sum(row.trained for row in rows))


def trajectory_mean(rows: Sequence[TrainingSequence]) -> tuple[list[float], float]:
    """Weighs every trajectory 1, over all its rows; N is the number of trajectories."""
    tokens = _tokens_by_trajectory(rows)
    # A trajectory with branches has several rows, which share its weight.
    weights = [1.0 / tokens[row.session_id] if row.trained else 0.0 for row in rows]
    return weights, float(sum(1 for number in tokens.values() if number))


def sequence_sum(length: int) -> Aggregation:
    """Weighs every trained token 1; N is `length` per trajectory: Dr. GRPO's constant divisor, so that the
    tokens of long episodes weigh no less (Liu et al., 2025, §3.2)."""

    def aggregation(rows: Sequence[TrainingSequence]) -> tuple[list[float], float]:
        _, trajectories = trajectory_mean(rows)
        return [1.0] * len(rows), trajectories * length

    return aggregation


def _tokens_by_trajectory(rows: Sequence[TrainingSequence]) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.session_id] = tokens.get(row.session_id, 0) + row.trained
    return tokens


# ---------------------------------------------------------------------- penalties


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
        # `expm1`, as exp(−d) − 1 loses its digits near 0, where most tokens are.
        return zero_n, coefficient * (torch.expm1(-distance_n) + distance_n)

    return penalty


def teacher_penalty(form: str, weight: float) -> Penalty:
    """weight · KL(π_θ‖p_teacher) of the sampled tokens, in one of three forms:

    - `advantage`: log p_teacher − log μ, times the weight, is added to the token's advantage (Lu and Thinking
      Machines Lab, On-Policy Distillation, 2025). μ is recorded, so it is constant.
    - `loss`: (log π_θ − log p_teacher)²/2, times the weight, is added to the loss; on policy its gradient is
      that of the KL.
    - `distribution`: the KL over the teacher's likeliest ids, times the weight, is added to the loss
      (`top_divergence`).
    """

    def penalty(logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        assert batch.teacher_n is not None, "rows have no teacher's logprobs"
        zero_n = torch.zeros_like(logprobs_n)
        if form == "distribution":
            assert batch.policy_top_nk is not None
            assert batch.teacher_top_nk is not None, "rows have no likeliest tokens of the teacher"
            return zero_n, weight * top_divergence(batch.policy_top_nk, batch.teacher_top_nk)
        if form == "advantage":
            return weight * (batch.logprobs_n - batch.teacher_n), zero_n
        return zero_n, weight * (logprobs_n - batch.teacher_n).square() / 2

    return penalty


def top_divergence(policy_nk: Tensor, teacher_nk: Tensor) -> Tensor:
    """KL(π‖p) over k + 1 outcomes: the k ids, and all others together, [n].

    It is a lower bound of the KL over the whole vocabulary, as merging outcomes raises no divergence. Its
    gradient has no noise of a sampled token (Agarwal et al., On-Policy Distillation of Language Models,
    2024).

    Args:
        policy_nk: log π of the ids.
        teacher_nk: log p of the ids.
    """
    rest_n = (1.0 - policy_nk.exp().sum(dim=1)).clamp(min=SMALLEST_REST)
    teacher_rest_n = (1.0 - teacher_nk.exp().sum(dim=1)).clamp(min=SMALLEST_REST)
    listed_n = (policy_nk.exp() * (policy_nk - teacher_nk)).sum(dim=1)
    return listed_n + rest_n * (rest_n.log() - teacher_rest_n.log())


def added(first: Penalty, second: Penalty) -> Penalty:
    """The sum of two penalties."""

    def penalty(logprobs_n: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        lowered_n, added_n = first(logprobs_n, batch)
        more_lowered_n, more_added_n = second(logprobs_n, batch)
        return lowered_n + more_lowered_n, added_n + more_added_n

    return penalty
