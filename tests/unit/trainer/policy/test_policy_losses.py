"""Losses in the policy: the same gradient in any layout, π_old, minibatches, a reference model."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import make_tiny_model
from tests.unit.trainer.learning_fixtures import VOCABULARY, make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.errors import StartError, TrainingError
from tidegate.settings.losses import BY_NAME
from tidegate.trainer.batch.packing import prefix_batches
from tidegate.trainer.batch.rows import TrainingSequence, minibatches
from tidegate.trainer.losses.built_in import make_loss
from tidegate.trainer.policy import forward
from tidegate.trainer.policy.policy import Policy

SETTINGS = {"max_grad_norm": 1e9, "learning_rate": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "other", seed=1)


@pytest.fixture(scope="module")
def sampler(other: Path) -> Policy:
    """A policy that no test trains."""
    return Policy.load(other, TrainerSettings())


LOSSES = [name for name in BY_NAME if name != "custom"]


def make_batch(policy: Policy) -> list[TrainingSequence]:
    """Groups with a prompt in common and single rows, sampled from a policy not far away."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=4, prompt=prompt, group=f"g{prompt}") for prompt in (40, 25)]
    rows = [*make_rows(4), *(row for group in groups for row in group)]
    for row, logprobs in zip(rows, policy.logprobs(rows), strict=True):
        row.logprobs = np.where(row.mask, logprobs + rng.normal(0, 0.2, len(row.ids)), 0).astype(np.float32)
    rows[1].session_id = rows[0].session_id  # a trajectory of two rows
    return rows


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in policy.model.parameters()])


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in policy.model.parameters()])


def one_row_at_a_time(policy: Policy, rows: list[TrainingSequence]) -> torch.Tensor:
    """The gradient when each row has a forward and a backward pass of its own."""
    loss = make_loss(policy.settings)
    shares, denominator = loss.aggregation(rows)
    policy.model.zero_grad()
    for row, share in zip(rows, shares, strict=True):
        (bundle,) = prefix_batches([replace(row, weight=share)], 10_000, share=False)
        (batch,) = bundle.microbatches
        logits_tv = policy.model(input_ids=batch.ids_bt).logits[0]
        at = np.flatnonzero(row.mask)
        logits_nv = logits_tv[at - 1] / torch.tensor(row.temperature[at])[:, None]
        logprobs_n = torch.log_softmax(logits_nv, dim=-1)[range(len(at)), row.ids[at].astype(np.int64)]
        loss(logprobs_n, batch, denominator)[0].backward()
    return gradient(policy)


def tight(name: str) -> dict[str, object]:
    """A loss with bounds that many ratios lie beyond."""
    bounds = {"importance_cap": 1.2, "clip_high": 0.05}
    return {"name": name} | {key: value for key, value in bounds.items() if key in BY_NAME[name].model_fields}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_every_loss_is_that_of_one_row_at_a_time(base, name):
    settings = TrainerSettings(loss=tight(name), microbatch_tokens=200, **SETTINGS)
    policy = Policy.load(base, settings)
    rows = make_batch(policy)
    assert any(bundle.prefixes for bundle in prefix_batches(rows, 200))
    expected = one_row_at_a_time(policy, rows)
    metrics = policy.update(rows, version=3)
    assert float((gradient(policy) - expected).norm() / expected.norm()) <= 1e-6
    for figure in ("mismatch_kl", "lag_kl", "ess", "clip_fraction", "entropy"):
        assert math.isfinite(metrics[figure])
    assert metrics["clip_fraction"] > 0


def test_minibatches_are_steps_from_one_policy(base):
    """Against the same done by hand: π_old is that of the cut, for the second step too."""
    settings = {"loss": {"name": "decoupled_ppo"}, "max_grad_norm": 1e9, "learning_rate": 0.01}
    policy = Policy.load(base, TrainerSettings(**settings, minibatches=2))
    rows = make_batch(policy)
    halves = [[row for row in rows if row.group_id in half] for half in (("g0", "g1"), ("g2", "g40", "g25"))]
    by_hand = Policy.load(base, TrainerSettings(**settings))
    cut = Policy.load(base, TrainerSettings(**settings))
    for half in halves:
        old = cut.logprobs(half)
        by_hand.update([replace(row, old=one) for row, one in zip(half, old, strict=True)], version=3)
    metrics = policy.update(rows, version=3)
    assert (metrics["optimizer_steps"], metrics["skipped"]) == (2, 0)
    assert metrics["tokens/trained"] == sum(row.trained for row in rows)
    torch.testing.assert_close(weights(policy), weights(by_hand), rtol=1e-4, atol=1e-5)
    again = Policy.load(base, TrainerSettings(**settings, minibatches=2))
    assert not torch.equal(weights(again), weights(policy))


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])  # each has another denominator
def test_minibatches_that_stream_are_one_step_as_if_they_had_come_at_once(base, name):
    whole = Policy.load(base, TrainerSettings(loss={"name": name}, learning_rate=0.01))
    settings = TrainerSettings(loss={"name": name}, learning_rate=0.01, minibatches=3, streaming=True)
    streamed, together = (Policy.load(base, settings) for _ in range(2))
    rows = make_batch(whole)
    rows[1].group_id = rows[0].group_id  # of one trajectory, which minibatches don't part
    before = weights(streamed)
    for part in minibatches(rows, 3):
        streamed.backward(part, version=3)
        assert torch.equal(weights(streamed), before), "nothing moves before the last one is there"
    found, plain, replayed = streamed.optimizer_step(), whole.update(rows, 3), together.update(rows, 3)
    assert (found["optimizer_steps"], streamed.steps) == (1, 1)
    for figure in ("loss", "grad_norm", "lag_kl", "mismatch_kl", "clip_fraction", "ess", "tokens/trained"):
        assert found[figure] == pytest.approx(plain[figure], rel=1e-4, abs=1e-7)
        assert found[figure] == replayed[figure], "bit for bit, for a replay"
    assert float((gradient(streamed) - gradient(whole)).norm() / gradient(whole).norm()) <= 1e-5
    assert torch.equal(weights(streamed), weights(together))


def test_a_streamed_batch_that_is_not_finite_is_skipped_whole_and_forgotten(base):
    settings = TrainerSettings(minibatches=2, streaming=True, learning_rate=0.01)
    policy, fresh = (Policy.load(base, settings) for _ in range(2))
    rows = make_batch(policy)
    broken = [replace(row, advantages=row.advantages * np.nan) for row in rows if row.group_id == "g1"]
    policy.backward(rows, version=3)
    policy.backward(broken, version=3)
    metrics = policy.optimizer_step()
    assert (metrics["skipped"], policy.non_finite) == (1, ["g1"])
    assert policy.untrained == sorted({row.group_id for row in rows})
    assert torch.equal(weights(policy), weights(fresh))
    assert policy.update(rows, 3)["loss"] == fresh.update(rows, 3)["loss"]


def test_one_batch_is_one_step_of_the_schedule(base):
    settings = TrainerSettings(
        loss={"name": "decoupled_ppo"}, minibatches=3, schedule="linear", steps=4, learning_rate=0.1
    )
    policy = Policy.load(base, settings)
    rates = [policy.update(make_batch(policy), version=0)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([0.1, 0.07, 0.04, 0.01])
    assert policy.steps == 4


def test_the_metrics_of_a_batch_are_of_the_policy_at_its_assembly(base):
    settings = {"loss": {"name": "decoupled_ppo"}, "learning_rate": 0.05}
    policies = [Policy.load(base, TrainerSettings(**settings, minibatches=number)) for number in (1, 3)]
    rows = make_batch(policies[0])
    one, three = (policy.update(rows, version=3) for policy in policies)
    for name in ("mismatch_kl", "lag_kl", "ess", "logprob_max_error"):
        assert three[name] == pytest.approx(one[name], rel=1e-4)


def test_a_minibatch_that_is_not_finite_ends_the_batch(base):
    policy = Policy.load(
        base, TrainerSettings(loss={"name": "decoupled_ppo"}, minibatches=3, learning_rate=0.01)
    )
    rows = make_batch(policy)
    next(row for row in rows if row.group_id == "g1").advantages[:] = np.nan
    before = weights(policy)
    metrics = policy.update(rows, version=3)
    assert (metrics["optimizer_steps"], metrics["skipped"], policy.non_finite) == (1, 0, ["g1"])
    first, *later = minibatches(rows, 3)
    assert policy.untrained == sorted({row.group_id for part in later for row in part})
    assert metrics["tokens/trained"] == sum(row.trained for row in first)
    assert torch.isfinite(weights(policy)).all()
    assert not torch.equal(weights(policy), before)


def test_the_distance_to_a_reference_is_measured_and_penalised(base, other):
    free = Policy.load(base, TrainerSettings(reference_model=other, **SETTINGS))
    rows = make_batch(free)
    reference = Policy.load(other, TrainerSettings()).logprobs(rows)
    distance = np.concatenate(
        [(one - ref)[row.mask] for one, ref, row in zip(free.logprobs(rows), reference, rows, strict=True)]
    )
    metrics = free.update(rows, version=3)
    assert metrics["reference_kl"] == pytest.approx((np.exp(-distance) - 1 + distance).mean(), rel=1e-4)
    unbound = Policy.load(base, TrainerSettings(**SETTINGS))
    assert "reference_kl" not in unbound.update(rows, version=3)
    assert torch.equal(gradient(free), gradient(unbound)), "what is not penalised has no gradient"


@pytest.mark.parametrize(
    "estimator",
    [pytest.param("k1", marks=pytest.mark.slow), pytest.param("k2", marks=pytest.mark.slow), "k3"],
)
def test_a_penalty_draws_the_policy_to_its_reference(base, other, estimator):
    settings = TrainerSettings(
        reference_model=other, kl_coef=1.0, kl_estimator=estimator, learning_rate=0.003
    )
    policy = Policy.load(base, settings)
    rng = np.random.default_rng(0)
    rows = make_group(rng, size=16, prompt=3, replies=(8, 8))
    for row in rows:
        row.advantages[:] = 0
    distances = []
    for _ in range(15):
        for row, logprobs in zip(rows, policy.logprobs(rows), strict=True):
            row.logprobs = logprobs
        distances.append(policy.update(rows, version=0)["reference_kl"])
    assert distances[-1] < 0.5 * distances[0]
    frozen = Policy.load(other, TrainerSettings()).model.state_dict()
    for name, one in policy._reference.model.state_dict().items():
        assert torch.equal(one, frozen[name])


def test_a_reference_of_another_vocabulary_is_refused(base, tmp_path):
    make_tiny_model(tmp_path / "small", vocab=40, hidden=32)
    with pytest.raises(StartError, match="vocabulary of 40"):
        Policy.load(base, TrainerSettings(reference_model=tmp_path / "small"))


@pytest.mark.parametrize("limit", [None, 8])
def test_a_teachers_likeliest_tokens_draw_the_policy_to_it(base, other, monkeypatch, limit):
    """Without rewards. The divergence falls over all tokens, also if logits are computed in pieces."""
    if limit:
        monkeypatch.setattr(forward, "LOGITS_AT_ONCE", limit * VOCABULARY)
    teacher = {"url": "http://t", "form": "distribution", "top_k": 8, "reward_weight": 0}
    settings = TrainerSettings(teacher=teacher, group_size=1, learning_rate=0.003)
    policy = Policy.load(base, settings)
    model = Policy.load(other, TrainerSettings()).model
    rows = make_group(np.random.default_rng(0), size=16, prompt=3, replies=(8, 8))
    for row in rows:
        row.advantages[:] = 0
        with torch.no_grad():
            logits = model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, :-1]
        top = torch.log_softmax(logits, -1).topk(8)
        before = np.zeros((1, 8))
        row.teacher = np.zeros(len(row.ids), np.float32)
        row.teacher_ids = np.concatenate([before, top.indices.numpy()]).astype(np.int32)
        row.teacher_top = np.concatenate([before, top.values.numpy()]).astype(np.float32)
    losses = [policy.update(rows, version=0)["loss"] for _ in range(15)]
    assert 0 < losses[-1] < 0.3 * losses[0]
    rows[2].teacher_ids = rows[2].teacher_top = None
    with pytest.raises(TrainingError, match=r"has 0 likeliest tokens .* not 8 \(trainer.teacher.top_k\)"):
        policy.update(rows, version=0)


def listed_by(policy: Policy, rows: list[TrainingSequence], number: int) -> None:
    """The sampler's likeliest ids at each token, as turns have them."""
    for row in rows:
        with torch.no_grad():
            logits = policy.model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, :-1]
        logits = logits / torch.tensor(row.temperature[1:, None])
        top = torch.log_softmax(logits, -1).topk(number)
        before = np.zeros((1, number))
        row.sampler_ids = np.concatenate([before, top.indices.numpy()]).astype(np.int32)
        row.sampler_listed = np.concatenate([before, top.values.numpy()]).astype(np.float16)


def centred_by_hand(policy: Policy, rows: list[TrainingSequence], cap: float) -> torch.Tensor:
    """The gradient of truncated_is less A · Σ q · min(p/q, cap) · ∇ log p over the vocabulary."""
    expected = one_row_at_a_time(policy, rows)
    policy.model.zero_grad()
    for row in rows:
        at = np.flatnonzero(row.mask)
        logits = policy.model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, at - 1]
        log_p = torch.log_softmax(logits / torch.tensor(row.temperature[at])[:, None], dim=-1)
        ids = torch.tensor(row.sampler_ids[at].astype(np.int64))
        listed = torch.tensor(row.sampler_listed[at].astype(np.float32))
        log_q = torch.empty_like(listed).scatter(1, ids, listed)
        weighted = torch.minimum(log_p.detach().exp(), cap * log_q.exp())
        (torch.tensor(row.advantages[at]) * (weighted * log_p).sum(dim=1)).sum().backward()
    return expected + gradient(policy) / sum(row.trained for row in rows)


@pytest.mark.parametrize("pieces", [False, True])
def test_with_the_whole_vocabulary_listed_a_step_is_centered_exactly(base, sampler, monkeypatch, pieces):
    """At several temperatures, with shared prefixes, and with logits computed in pieces."""
    if pieces:
        monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 8 * VOCABULARY)
    loss = {"name": "truncated_is", "importance_cap": 1.2}
    plain = Policy.load(base, TrainerSettings(loss=loss, microbatch_tokens=200, **SETTINGS))
    settings = TrainerSettings(
        loss={**loss, "score_centering": VOCABULARY}, microbatch_tokens=200, **SETTINGS
    )
    policy = Policy.load(base, settings)
    rows = make_batch(policy)
    listed_by(sampler, rows, VOCABULARY)
    expected = centred_by_hand(plain, rows, 1.2)
    metrics = policy.update(rows, version=3)
    assert float((gradient(policy) - expected).norm() / expected.norm()) <= 1e-6
    plain.update(rows, version=3)
    assert float((gradient(plain) - expected).norm() / expected.norm()) > 0.05, "the case proves too little"
    assert metrics["skipped"] == 0


@pytest.mark.parametrize("name", [one for one in LOSSES if "score_centering" in BY_NAME[one].model_fields])
def test_a_step_of_every_loss_is_centered_with_some_ids_listed(base, sampler, name):
    """Where an engine listed fewer ids, as many are used of all. An advantage that all tokens share moves
    the policy less."""
    norms = []
    for listed in (0, 12):
        loss = {"name": name, "score_centering": listed}
        policy = Policy.load(base, TrainerSettings(loss=loss, microbatch_tokens=200, **SETTINGS))
        rows = make_batch(policy)
        listed_by(sampler, rows, 12)
        listed_by(sampler, rows[:1], 9)
        metrics = policy.update(rows, version=3)
        assert (metrics["skipped"], metrics["optimizer_steps"]) == (0, 1)
        norms.append(metrics["grad_norm"])
    assert norms[0] != norms[1]
    assert math.isfinite(norms[1])
    rows[2].sampler_ids = rows[2].sampler_listed = None
    with pytest.raises(TrainingError, match=f"{rows[2].session_id} has no likeliest ids of the engine"):
        policy.update(rows, version=3)


def test_a_teacher_and_centering_have_ids_of_their_own(base, sampler):
    teacher = {"url": "http://t", "form": "distribution", "top_k": 4, "weight": 0.5}
    gradients = []
    for listed, given in ((6, teacher), (6, {}), (0, teacher), (0, {})):
        settings = TrainerSettings(loss={"score_centering": listed}, teacher=given, **SETTINGS)
        policy = Policy.load(base, settings)
        rows = make_batch(policy)
        listed_by(sampler, rows, 6)
        for row in rows:
            row.teacher = row.logprobs
            row.teacher_ids = row.sampler_ids[:, 1:5] if given else None
            row.teacher_top = row.sampler_listed[:, 1:5].astype(np.float32) if given else None
        policy.update(rows, version=3)
        gradients.append(gradient(policy))
    both, centered, taught, neither = gradients
    torch.testing.assert_close(both, centered + taught - neither, rtol=1e-3, atol=1e-5)
    assert float((centered - neither).norm() / neither.norm()) > 0.01


def test_rows_without_the_teachers_logprobs_are_refused(base):
    policy = Policy.load(base, TrainerSettings(teacher={"url": "http://t"}, **SETTINGS))
    rows = make_rows(4)
    for row in rows[:3]:
        row.teacher = row.logprobs - 1.0
    with pytest.raises(TrainingError, match=f"session {rows[3].session_id} has no logprobs of the teacher"):
        policy.update(rows, version=3)
    rows[3].teacher = rows[3].logprobs - 1.0
    assert policy.update(rows, version=3)["skipped"] == 0


@pytest.mark.parametrize("pieces", [False, True])
def test_a_step_over_kept_ids_has_the_gradient_of_the_renormalised_policy(base, sampler, monkeypatch, pieces):
    """At several temperatures, with shared prefixes, in pieces; every third row is of the whole vocabulary.
    π_ref and π_old are over the same ids, so a reference with the same weights has no distance."""
    if pieces:
        monkeypatch.setattr(forward, "LOGITS_AT_ONCE", 8 * VOCABULARY)
    settings = TrainerSettings(
        loss={"name": "truncated_is", "importance_cap": 1.2},
        microbatch_tokens=200,
        reference_model=base,
        **SETTINGS,
    )
    policy, rows = Policy.load(base, settings), make_rows(9, shortest=20)
    listed_by(sampler, rows, VOCABULARY)
    total, kl = sum(row.trained for row in rows), 0.0
    policy.model.zero_grad()
    for number, row in enumerate(rows):
        at = np.flatnonzero(row.mask)
        ids, targets = (
            torch.tensor(row.sampler_ids.astype(np.int64))[at],
            torch.tensor(row.ids.astype(np.int64))[at],
        )
        sampler = torch.empty(len(at), VOCABULARY).scatter(
            1, ids, torch.tensor(row.sampler_listed.astype(np.float32))[at]
        )
        excluded = torch.ones(len(at), VOCABULARY, dtype=torch.bool)
        if number % 3:  # the 1 to 6 likeliest ids and the token
            counts = 1 + np.arange(len(at)) % 6
            for place, count in enumerate(counts):
                excluded[place, ids[place, :count]] = False
                excluded[place, targets[place]] = False
            row.kept_counts = np.zeros(len(row.ids), dtype=np.int32)
            row.kept_counts[at] = (~excluded).sum(1).numpy()
            row.kept_ids = (~excluded).nonzero()[:, 1].numpy().astype(np.int32)
        else:
            excluded[:] = False
        own = torch.log_softmax(sampler.masked_fill(excluded, -torch.inf), 1).gather(1, targets[:, None])[
            :, 0
        ]
        row.logprobs[at] = own.numpy()
        row.sampler_ids = row.sampler_listed = None
        logits = policy.model(torch.tensor(row.ids[None].astype(np.int64))).logits[0, at - 1]
        logits = (logits / torch.tensor(row.temperature[at])[:, None]).masked_fill(excluded, -torch.inf)
        logprobs = torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]
        weights = (logprobs.detach() - own).exp().clamp(max=1.2) * torch.tensor(row.advantages[at])
        (-(weights * logprobs).sum() / total).backward()
        ratio = logprobs.detach().double() - own
        kl += float((torch.expm1(ratio) - ratio).sum()) / total
    expected = gradient(policy)
    metrics = policy.update(rows, version=3)
    assert float((gradient(policy) - expected).norm() / expected.norm()) <= 1e-5
    assert metrics["lag_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    for row in rows:
        row.kept_ids = row.kept_counts = None
    policy = Policy.load(base, settings)
    without = policy.update(rows, version=3)
    assert float((gradient(policy) - expected).norm() / expected.norm()) > 0.05, "the case proves too little"
    assert abs(without["lag_kl"] - kl) > 0.2 * kl
