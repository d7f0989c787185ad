"""Every loss by name against its formula, written plainly: row by row, in float64, with autograd.

The formulas do not know microbatches: their input is trajectories, each a list of rows of trained tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.trainer.learning_fixtures import lay, make_row
from tidegate.config import TrainerSettings
from tidegate.errors import ConfigError
from tidegate.settings.losses import BY_NAME
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.losses.built_in import make_loss
from tidegate.trainer.losses.parts import top_divergence

CAP = 1.3
DUAL_CLIP = 1.4
SEQUENCE_MASK = 0.04


@dataclass
class Sample:
    """One row of trained tokens, all [n] in float64; `pi` wants its gradient."""

    pi: Tensor
    mu: Tensor
    old: Tensor
    reference: Tensor
    teacher: Tensor
    advantage: Tensor


Trajectories = list[list[Sample]]


def tokens(trajectories: Trajectories) -> int:
    return sum(len(row.pi) for rows in trajectories for row in rows)


def token_mean(trajectories: Trajectories, value: Callable[[Sample], Tensor]) -> Tensor:
    return -sum(value(row).sum() for rows in trajectories for row in rows) / tokens(trajectories)


def sequence_mean(trajectories: Trajectories, value: Callable[[Sample], Tensor]) -> Tensor:
    means = [sum(value(row).sum() for row in rows) / tokens([rows]) for rows in trajectories]
    return -sum(means) / len(means)


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """PPO's, a token at a time."""
    values = []
    for r, a in zip(ratio, advantage, strict=True):
        clipped = min(max(r.item(), 1 - low), 1 + high)
        values.append(r * a if (r * a).item() <= clipped * a.item() else clipped * a + 0 * r)
    return torch.stack(values)


def weighted(weights: list[float], row: Sample) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) * row.advantage * row.pi


def ratios(row: Sample) -> list[float]:
    return (row.pi - row.mu).exp().tolist()


def whole_ratio(row: Sample) -> float:
    return float(torch.tensor(ratios(row), dtype=torch.float64).prod())


def gspo_ratio(row: Sample) -> Tensor:
    """GSPO's s_i (Zheng et al., 2025, eq. 7), the same for every token of the row."""
    return ((row.pi - row.mu).sum() / len(row.pi)).exp().repeat(len(row.pi))


def gspo_token_ratio(row: Sample) -> Tensor:
    """GSPO-token's s_i,t = sg[s_i] · π_t ÷ sg[π_t] (eq. 14)."""
    return gspo_ratio(row).detach() * row.pi.exp() / row.pi.exp().detach()


def decoupled(row: Sample) -> Tensor:
    correction = torch.tensor([min(one, CAP) for one in (row.old - row.mu).exp().tolist()])
    return correction * surrogate((row.pi - row.old).exp(), row.advantage, 0.2, 0.2)


def dual_clipped(row: Sample) -> Tensor:
    """Ye et al., 2020: max(min(r·A, clip(r)·A), c·A) where A < 0."""
    values = surrogate((row.pi - row.mu).exp(), row.advantage, 0.2, 0.28)
    floors = DUAL_CLIP * row.advantage
    below = [
        a < 0 and v < f
        for v, f, a in zip(values.tolist(), floors.tolist(), row.advantage.tolist(), strict=True)
    ]
    return torch.stack([floors[n] + 0 * values[n] if cut else values[n] for n, cut in enumerate(below)])


def sequence_masked(row: Sample, values: Tensor) -> Tensor:
    """M of DeepSeek-V3.2: 0 where A < 0 and the mean of log μ/π over the row is above the threshold."""
    far = sum((row.mu - row.pi).tolist()) / len(row.pi) > SEQUENCE_MASK
    return torch.tensor([0.0 if far and a < 0 else 1.0 for a in row.advantage.tolist()]) * values


def total_variation(pi: float, mu: float) -> float:
    return (abs(pi - mu) + abs((1 - pi) - (1 - mu))) / 2


def kl(pi: float, mu: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def dppo(row: Sample, divergence: Callable[[float, float], float], threshold: float) -> Tensor:
    """DPPO's M · min(r, C) · A · log π, M = 0 for tokens beyond the threshold that would move on."""
    weights = []
    for pi, mu, a in zip(row.pi.exp().tolist(), row.mu.exp().tolist(), row.advantage.tolist(), strict=True):
        further = (a > 0 and pi > mu) or (a < 0 and pi < mu)
        weights.append(0.0 if further and divergence(pi, mu) > threshold else min(pi / mu, CAP))
    return weighted(weights, row)


PLAIN: dict[str, Callable[[Trajectories], Tensor]] = {
    "truncated_is": lambda t: token_mean(t, lambda x: weighted([min(r, CAP) for r in ratios(x)], x)),
    "masked_is": lambda t: token_mean(t, lambda x: weighted([r if r <= CAP else 0 for r in ratios(x)], x)),
    "truncated_is_sequence": lambda t: token_mean(
        t, lambda x: weighted([min(whole_ratio(x), CAP)] * len(x.pi), x)
    ),
    "masked_is_sequence": lambda t: token_mean(
        t, lambda x: weighted([whole_ratio(x) if whole_ratio(x) <= CAP else 0] * len(x.pi), x)
    ),
    "cispo": lambda t: token_mean(t, lambda x: weighted([min(max(r, 0.9), 1.2) for r in ratios(x)], x)),
    "grpo": lambda t: sequence_mean(
        t, lambda x: surrogate((x.pi - x.mu).exp(), x.advantage, 0.2, 0.2)
    ),
    "dr_grpo": lambda t: token_mean(
        t, lambda x: surrogate((x.pi - x.mu).exp(), x.advantage, 0.2, 0.2)
    ) * tokens(t) / (len(t) * 50),
    "dapo": lambda t: token_mean(t, lambda x: surrogate((x.pi - x.mu).exp(), x.advantage, 0.2, 0.28)),
    "gspo": lambda t: sequence_mean(t, lambda x: surrogate(gspo_token_ratio(x), x.advantage, 0.01, 0.02)),
    "decoupled_ppo": lambda t: token_mean(t, decoupled),
    "dapo_dual_clip": lambda t: token_mean(t, dual_clipped),
    "dapo_masked": lambda t: token_mean(t, lambda x: sequence_masked(x, dual_clipped(x))),
    "grpo_masked": lambda t: sequence_mean(
        t, lambda x: sequence_masked(x, surrogate((x.pi - x.mu).exp(), x.advantage, 0.2, 0.2))
    ),
    "dr_grpo_masked": lambda t: token_mean(
        t, lambda x: sequence_masked(x, surrogate((x.pi - x.mu).exp(), x.advantage, 0.2, 0.2))
    ) * tokens(t) / (len(t) * 50),
    "dppo": lambda t: token_mean(t, lambda x: dppo(x, total_variation, 0.03)),
    "dppo_kl": lambda t: token_mean(t, lambda x: dppo(x, kl, 0.01)),
}  # fmt: skip
OWN = {
    "cispo": {"clip_low": 0.1, "clip_high": 0.2},
    "dr_grpo": {"sequence_length": 50},
    "gspo": {"clip_low": 0.01, "clip_high": 0.02},
    "truncated_is_sequence": {"name": "truncated_is", "level": "sequence"},
    "masked_is_sequence": {"name": "masked_is", "level": "sequence"},
    "dapo": {"dual_clip": 1e9},
    "dapo_dual_clip": {"name": "dapo", "dual_clip": DUAL_CLIP},
    "dapo_masked": {"name": "dapo", "dual_clip": DUAL_CLIP, "sequence_mask": SEQUENCE_MASK},
    "grpo_masked": {"name": "grpo", "sequence_mask": SEQUENCE_MASK},
    "dr_grpo_masked": {"name": "dr_grpo", "sequence_mask": SEQUENCE_MASK, "sequence_length": 50},
    "dppo": {"divergence": "tv", "threshold": 0.03},
    "dppo_kl": {"name": "dppo", "divergence": "kl", "threshold": 0.01},
}
KL = {
    "k2": lambda x: (x.pi - x.reference) ** 2 / 2,
    "k3": lambda x: (x.reference - x.pi).exp() - 1 - (x.reference - x.pi),
}


def settings_of(name: str, **others: object) -> TrainerSettings:
    loss = {"name": name, **OWN.get(name, {})}
    if "importance_cap" in BY_NAME[loss["name"]].model_fields:
        loss["importance_cap"] = CAP
    return TrainerSettings(loss=loss, **others)


def make_case(seed: int = 0) -> tuple[list[TrainingSequence], list[np.ndarray]]:
    """Rows of seven trajectories, two of which have several, and log π of their trained tokens. Ratios lie
    on both sides of every bound, of single tokens and of whole rows; advantages have both signs."""
    rng = np.random.default_rng(seed)
    rows, found = [], []
    for number, session in enumerate((0, 1, 1, 2, 3, 4, 5, 5, 5, 6)):
        row = replace(make_row(rng, shortest=6, longest=24), session_id=f"s{session}")
        length = len(row.ids)
        gap = rng.normal((number % 3 - 1) * 0.05, 0.25, length)
        row.old = (row.logprobs + rng.normal(0, 0.3, length)).astype(np.float32)
        row.teacher = (row.logprobs + rng.normal(0, 0.5, length)).astype(np.float32)
        row.reference = (row.logprobs + rng.normal(0, 0.5, length)).astype(np.float32)
        row.advantages = np.where(row.mask, (-1) ** session * (1 + 0.1 * session), 0).astype(np.float32)
        rows.append(row)
        found.append(np.minimum(row.logprobs + gap, -0.01)[row.mask])
    return rows, found


def samples(rows: list[TrainingSequence], logprobs: list[np.ndarray]) -> tuple[Trajectories, list[Tensor]]:
    sessions: dict[str, list[Sample]] = {}
    for row, pi in zip(rows, logprobs, strict=True):
        recorded = (row.logprobs, row.old, row.reference, row.teacher, row.advantages)
        mu, old, reference, teacher, advantage = (torch.tensor(one[row.mask]).double() for one in recorded)
        one = Sample(torch.tensor(pi, requires_grad=True), mu, old, reference, teacher, advantage)
        sessions.setdefault(row.session_id, []).append(one)
    trajectories = list(sessions.values())
    return trajectories, [row.pi for part in trajectories for row in part]


def ours(
    settings: TrainerSettings, rows: list[TrainingSequence], logprobs: list[np.ndarray], max_tokens: int
) -> tuple[float, list[Tensor], int]:
    """Our loss, its gradients by row, and how many tokens were cut."""
    loss = make_loss(settings)
    weights, denominator = loss.aggregation(rows)
    rows = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
    total, cut, gradients = 0.0, 0, [torch.empty(0)] * len(rows)
    for batch in lay(rows, max_tokens):
        pi_n = torch.cat([torch.tensor(logprobs[index]) for index in batch.rows]).requires_grad_()
        share, cut_n = loss(pi_n, batch, denominator)
        share.backward()
        total, cut = total + share.item(), cut + int(cut_n.sum())
        for at, index in enumerate(batch.rows):
            gradients[index] = pi_n.grad[batch.row_n == at]
    return total, gradients, cut


def compared(
    settings: TrainerSettings,
    rows: list[TrainingSequence],
    logprobs: list[np.ndarray],
    expected: Tensor,
    leaves: list[Tensor],
    max_tokens: int = 64,
    rel: float = 1e-6,
) -> tuple[list[Tensor], int]:
    """Checks our value and gradients against the formula's; returns the gradients, and how many were cut."""
    expected.backward()
    value, gradients, cut = ours(settings, rows, logprobs, max_tokens)
    assert value == pytest.approx(expected.item(), rel=rel)
    for found, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=10 * rel, atol=rel / 100)
    return gradients, cut


@pytest.mark.parametrize("max_tokens", [64, 4096])
@pytest.mark.parametrize("name", PLAIN)
def test_value_and_gradient_are_the_formulas(name, max_tokens):
    rows, logprobs = make_case()
    trajectories, leaves = samples(rows, logprobs)
    expected = PLAIN[name](trajectories)
    _, cut = compared(settings_of(name), rows, logprobs, expected, leaves, max_tokens)
    assert 0 < cut < tokens(trajectories), "the case proves too little"


@pytest.mark.parametrize("name", ["truncated_is", "grpo", "decoupled_ppo"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_is_added_with_the_tokens_weight(name, estimator):
    rows, logprobs = make_case()
    trajectories, leaves = samples(rows, logprobs)
    mean = sequence_mean if name == "grpo" else token_mean
    expected = PLAIN[name](trajectories) - 0.3 * mean(trajectories, KL[estimator])
    settings = settings_of(name, reference_model="ref", kl_coef=0.3, kl_estimator=estimator)
    compared(settings, rows, logprobs, expected, leaves)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("added", "of", "rel"),
    [
        (
            lambda x: -0.3 * (x.pi - x.reference).detach(),
            {"reference_model": "ref", "kl_coef": 0.3, "kl_estimator": "k1"},
            1e-6,
        ),
        (lambda x: 0.3 * (x.teacher - x.mu), {"teacher": {"url": "http://t", "weight": 0.3}}, 1e-5),
    ],
    ids=["k1", "teacher"],
)
def test_k1_and_a_teacher_are_added_to_the_advantage_of_each_token(name, added, of, rel):
    """A − 0.3 · (log π − log π_ref), or A + weight · (log p_teacher − log μ), with the recorded μ."""
    rows, logprobs = make_case()
    trajectories, leaves = samples(rows, logprobs)
    for row in (row for part in trajectories for row in part):
        row.advantage = row.advantage + added(row)
    compared(settings_of(name, **of), rows, logprobs, PLAIN[name](trajectories), leaves, rel=rel)


@pytest.mark.parametrize("name", ["truncated_is", "grpo"])
def test_a_teacher_as_a_term_of_the_loss_adds_to_the_penalty_of_a_reference(name):
    rows, logprobs = make_case()
    trajectories, leaves = samples(rows, logprobs)
    mean = sequence_mean if name == "grpo" else token_mean
    expected = PLAIN[name](trajectories) - 0.3 * mean(trajectories, KL["k3"])
    expected = expected - 0.7 * mean(trajectories, lambda x: (x.pi - x.teacher) ** 2 / 2)
    teacher = {"url": "http://t", "weight": 0.7, "form": "loss"}
    settings = settings_of(name, reference_model="ref", kl_coef=0.3, teacher=teacher)
    compared(settings, rows, logprobs, expected, leaves)


def test_gspo_with_one_advantage_a_row_has_the_gradient_of_sequence_level_gspo():
    rows, logprobs = make_case()
    trajectories, leaves = samples(rows, logprobs)
    sequence_mean(trajectories, lambda x: surrogate(gspo_ratio(x), x.advantage, 0.01, 0.02)).backward()
    _, gradients, cut = ours(settings_of("gspo"), rows, logprobs, 64)
    for found, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-5, atol=1e-8)
    assert 0 < cut < tokens(trajectories), "the case proves too little"


def test_gspo_weights_each_turn_by_its_own_advantage():
    """Rewards of single turns give the tokens of a row several advantages, of both signs. The gradient is
    GSPO-token's, not that of sequence-level GSPO, which spreads the sum of the advantages over all tokens."""
    rows, logprobs = make_case()
    rng = np.random.default_rng(5)
    for row in rows:
        by_turn = rng.normal(0, 1, 3).astype(np.float32)
        turn_n = np.arange(len(row.ids)) * 3 // len(row.ids)
        row.advantages = np.where(row.mask, by_turn[turn_n], 0).astype(np.float32)
    trajectories, leaves = samples(rows, logprobs)
    expected = PLAIN["gspo"](trajectories)
    gradients, cut = compared(settings_of("gspo"), rows, logprobs, expected, leaves)
    assert 0 < cut < tokens(trajectories), "the case proves too little"
    sequence_level = sequence_mean(trajectories, lambda x: surrogate(gspo_ratio(x), x.advantage, 0.01, 0.02))
    for leaf in leaves:
        leaf.grad = None
    sequence_level.backward()
    gap = max(float((found - leaf.grad).abs().max()) for found, leaf in zip(gradients, leaves, strict=True))
    assert gap > 0.01


@pytest.mark.parametrize("name", PLAIN)
def test_on_policy_every_gradient_is_reinforces(name):
    """π = π_old = μ: no ratio is cut, and they differ in nothing but their aggregation."""
    rows, _ = make_case()
    rows = [replace(row, old=row.logprobs) for row in rows]
    logprobs = [row.logprobs[row.mask].astype(np.float64) for row in rows]
    _, gradients, cut = ours(settings_of(name), rows, logprobs, 4096)
    weights, denominator = make_loss(settings_of(name)).aggregation(rows)
    assert cut == 0
    for row, weight, found in zip(rows, weights, gradients, strict=True):
        expected = -weight * row.advantages[row.mask].astype(np.float64) / denominator
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_branches_do_not_raise_the_weight_of_a_trajectory(name):
    """A trajectory's weight is the same in one row as in three."""
    rows, _ = make_case()
    weights, denominator = make_loss(settings_of(name)).aggregation(rows)
    totals: dict[str, float] = {}
    for row, weight in zip(rows, weights, strict=True):
        totals[row.session_id] = totals.get(row.session_id, 0.0) + weight * row.trained
    assert denominator == 7
    assert list(totals.values()) == pytest.approx([1.0] * 7)


FINITE = ["truncated_is_sequence", "masked_is_sequence", "masked_is", "truncated_is", "dppo", "dppo_kl"]


@pytest.mark.parametrize("name", FINITE)
def test_a_ratio_beyond_all_numbers_leaves_the_loss_finite(name):
    rows, _ = make_case()
    logprobs = [row.logprobs[row.mask].astype(np.float64) + 800.0 for row in rows]
    value, gradients, cut = ours(settings_of(name), rows, logprobs, 4096)
    assert np.isfinite(value)
    assert all(torch.isfinite(one).all() for one in gradients)
    assert cut == sum(row.trained for row in rows)


@pytest.mark.parametrize("name", ["dapo_dual_clip", "dapo_masked"])
def test_dual_clipping_bounds_the_loss_of_tokens_with_a_negative_advantage(name):
    rows, _ = make_case()
    rows = [replace(row, advantages=-abs(row.advantages)) for row in rows]
    logprobs = [row.logprobs[row.mask].astype(np.float64) + 800.0 for row in rows]
    value, gradients, cut = ours(settings_of(name), rows, logprobs, 4096)
    expected = -DUAL_CLIP * sum(row.advantages.sum() for row in rows) / sum(row.trained for row in rows)
    assert value == pytest.approx(expected, rel=1e-6)
    assert all((one == 0).all() for one in gradients)
    assert cut == sum(row.trained for row in rows)
    assert ours(TrainerSettings(loss={"name": "dapo"}), rows, logprobs, 4096)[0] == pytest.approx(
        expected * 10.0 / DUAL_CLIP
    )


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.15), ("kl", 0.05)])
@pytest.mark.parametrize("sign", [1, -1])
def test_dppo_stops_a_token_beyond_its_threshold_that_would_move_further(divergence, threshold, sign):
    """At the default thresholds, in each direction. A token that returns is trained on."""
    distance, mu = {"tv": total_variation, "kl": kl}[divergence], 0.5
    steps = [mu + sign * (number + 0.5) / 1000 for number in range(499)]
    inside = [pi for pi in steps if distance(pi, mu) <= threshold][-1]
    beyond = inside + sign / 1000
    loss = make_loss(TrainerSettings(loss={"name": "dppo", "divergence": divergence}))
    row = make_row(np.random.default_rng(0), shortest=6, longest=24)
    row.logprobs = np.where(row.mask, np.log(mu), 0).astype(np.float32)
    for pi, advantage, trained in ((inside, sign, True), (beyond, sign, False), (beyond, -sign, True)):
        row.advantages = np.where(row.mask, advantage, 0).astype(np.float32)
        (batch,) = lay([row], 64)
        pi_n = torch.full((row.trained,), float(np.log(pi)), requires_grad=True)
        loss(pi_n, batch, 1.0)[0].backward()
        expected = -advantage * pi / mu if trained else 0.0
        torch.testing.assert_close(pi_n.grad, torch.full((row.trained,), expected), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", ["dppo", "dppo_kl"])
@pytest.mark.parametrize("certain", ["pi", "mu", "both"])
def test_dppo_is_finite_where_a_token_is_certain(name, certain):
    rows, logprobs = make_case()
    if certain != "mu":
        logprobs = [np.zeros_like(one) for one in logprobs]
    if certain != "pi":
        rows = [replace(row, logprobs=np.zeros_like(row.logprobs)) for row in rows]
    value, gradients, _ = ours(settings_of(name), rows, logprobs, 4096)
    assert np.isfinite(value)
    assert all(torch.isfinite(one).all() for one in gradients)
    for row, pi, gradient in zip(rows, logprobs, gradients, strict=True) if certain == "mu" else ():
        distance = 1 - np.exp(pi) if name == "dppo" else -pi
        beyond = (row.advantages[row.mask] < 0) & (distance > OWN[name]["threshold"])
        assert ((gradient == 0).numpy() == beyond).all()


def test_with_one_optimiser_step_a_batch_the_policy_is_that_of_its_assembly():
    rows, logprobs = make_case()
    for row, pi in zip(rows, logprobs, strict=True):
        row.old = np.zeros(len(row.ids), np.float32)
        row.old[row.mask] = pi
    expected = ours(settings_of("decoupled_ppo"), rows, logprobs, 64)
    found = ours(settings_of("decoupled_ppo"), [replace(row, old=None) for row in rows], logprobs, 64)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


def test_every_loss_has_a_formula():
    assert {settings_of(name).loss.name for name in PLAIN} == BY_NAME.keys() - {"custom"}


OWN_LOSS = """
from tidegate.trainer.losses.loss import Loss
from tidegate.trainer.losses.parts import ppo_clip, token_ratio, trajectory_mean

def clipped(low, high=0.2):
    return Loss(token_ratio, ppo_clip(low, high), trajectory_mean)

def nothing():
    return None
"""


def test_a_loss_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    rows, logprobs = make_case()

    def own(function, **options):
        return TrainerSettings(loss={"use": f"{tmp_path / 'mine.py'}:{function}", "options": options})

    value, gradients, cut = ours(own("clipped", low=0.2), rows, logprobs, 64)
    expected = ours(settings_of("grpo"), rows, logprobs, 64)
    assert (value, cut) == (expected[0], expected[2])
    for one, other in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="needs the option 'low'"):
        make_loss(own("clipped"))
    with pytest.raises(ConfigError, match="returned NoneType, not a tidegate"):
        make_loss(own("nothing"))
    with pytest.raises(ConfigError, match="has no loss 'cliped'; did you mean 'clipped'"):
        make_loss(own("cliped"))


def test_the_divergence_from_all_of_a_teachers_tokens_is_the_kl_with_its_gradient():
    """Against KL(π‖p) in float64, by autograd over the logits."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=random, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(2 * torch.randn(5, 11, generator=random, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    expected = (policy.exp() * (policy - teacher)).sum(-1)
    found = top_divergence(policy, teacher)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(*gradients)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 10))
def test_the_divergence_from_a_teachers_likeliest_tokens_bounds_the_kl_from_below(seed, k):
    random = torch.Generator().manual_seed(seed)
    policy, teacher = torch.log_softmax(torch.randn(2, 4, 11, generator=random), -1)
    top = teacher.topk(k)
    found = top_divergence(policy.gather(1, top.indices), top.values)
    outcomes = [torch.cat([one.gather(1, top.indices).exp(), _others(one, top.indices)], 1)
                for one in (policy.double(), teacher.double())]  # fmt: skip
    merged = (outcomes[0] * (outcomes[0] / outcomes[1]).log()).sum(-1)
    torch.testing.assert_close(found.double(), merged, atol=1e-3, rtol=1e-3)
    assert (found <= (policy.exp() * (policy - teacher)).sum(-1) + 1e-4).all()
    assert (found >= -1e-4).all()


def _others(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Probability of all ids but these."""
    return logprobs.exp().scatter(1, ids, 0.0).sum(1, keepdim=True)
