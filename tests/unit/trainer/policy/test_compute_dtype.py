"""Forward passes in bfloat16 with parameters in float32."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.trainer.learning_fixtures import make_group, make_model, make_rows
from tidegate.config import TrainerSettings
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.policy import forward
from tidegate.trainer.policy.policy import Policy

GRADIENTS_APART = 0.03
"""‖g − g₃₂‖ ÷ ‖g₃₂‖: bfloat16 has 8 bits of mantissa, half a step of which is 0.002, and several layers
add up."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def load(base: Path, **settings: object) -> Policy:
    return Policy.load(base, TrainerSettings(**{"compute_dtype": "bfloat16", **settings}))


def batch() -> list[TrainingSequence]:
    rng = np.random.default_rng(0)
    return [*make_rows(4), *make_group(rng, size=4, prompt=40, group="g40")]


def test_gradients_are_close_to_those_of_float32(base: Path) -> None:
    policies = [load(base, compute_dtype=dtype, max_grad_norm=1e9) for dtype in ("float32", "bfloat16")]
    rows = batch()
    for row, logprobs in zip(rows, policies[0].logprobs(rows), strict=True):
        row.logprobs = logprobs
    metrics = [policy.update(rows, version=3) for policy in policies]
    exact, found = ([one.grad for one in policy.model.parameters()] for policy in policies)
    assert {one.dtype for one in found} == {torch.float32}
    gap = torch.stack([(a - b).norm() for a, b in zip(exact, found, strict=True)]).norm()
    relative = float(gap / torch.stack([one.norm() for one in exact]).norm())
    assert 1e-4 < relative < GRADIENTS_APART
    assert metrics[0]["logprob_max_error"] < 1e-5 < metrics[1]["logprob_max_error"] < 0.2


def test_the_gradient_of_the_head_adds_up_in_float32_over_pieces(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for logits_at_once in (2**26, 600):
        monkeypatch.setattr(forward, "LOGITS_AT_ONCE", logits_at_once)
        policy = load(base, max_grad_norm=1e9)
        policy.backward(batch(), version=3)
        found.append(policy.model.get_output_embeddings().weight.grad.clone())
    whole, pieces = found
    assert (whole - pieces).norm() < 1e-4 * whole.norm()


def test_logprobs_are_of_logits_that_are_not_rounded(base: Path) -> None:
    """The hidden states are rounded in both; rounded logits would be another 0.01 apart."""
    policy, rows = load(base), batch()
    exact = policy.logprobs(rows)
    policy._forward._logits = policy._forward._head
    rounded = policy.logprobs(rows)
    errors = np.concatenate([np.abs(a - b)[row.mask] for a, b, row in zip(exact, rounded, rows, strict=True)])
    assert errors.mean() > 1e-3


def test_passes_are_in_bfloat16_on_a_gpu_unless_the_settings_name_another_type() -> None:
    assert TrainerSettings().pass_dtype == "float32"
    assert TrainerSettings(device="cuda").pass_dtype == "bfloat16"
    assert TrainerSettings(device="cuda:1", compute_dtype="float32").pass_dtype == "float32"


def test_parameters_moments_and_logprobs_are_float32(base: Path, tmp_path: Path) -> None:
    policy = load(base, learning_rate=1e-3)
    policy.update(batch(), version=3)
    assert policy._forward.shares
    assert {one.dtype for one in policy.weights().values()} == {torch.float32}
    moments = policy._state.read(1)["optimizer"]["state"].values()
    assert {one.dtype for state in moments for one in state.values()} == {torch.float32}
    assert policy.logprobs(batch())[0].dtype == np.float32
    saved = Policy.load(policy.save_weights(tmp_path / "v1"), TrainerSettings())
    assert all(torch.equal(one, saved.weights()[name]) for name, one in policy.weights().items())


def test_a_step_that_is_not_finite_is_skipped_and_named(base: Path) -> None:
    policy = load(base, learning_rate=1e-3)
    before = {name: one.clone() for name, one in policy.weights().items()}
    rows = batch()
    rows[2].group_id, rows[2].advantages[:] = "bad", math.nan
    assert policy.update(rows, version=3)["skipped"] == 1
    assert policy.non_finite == ["bad"]
    assert all(torch.equal(one, before[name]) for name, one in policy.weights().items())
    assert policy.update(batch(), version=3)["skipped"] == 0


def test_what_is_rewarded_becomes_likely(base: Path) -> None:
    policy = load(base, learning_rate=3e-3)
    rows = make_rows(8)
    for number, row in enumerate(rows):
        row.advantages[row.mask] = (-1.0) ** number
    first = policy.logprobs(rows)
    for _ in range(10):
        for row, logprobs in zip(rows, policy.logprobs(rows), strict=True):
            row.logprobs = logprobs
        policy.update(rows, version=3)
    gained = [float((b - a).sum()) for a, b in zip(first, policy.logprobs(rows), strict=True)]
    assert min(gained[::2]) > 1 > -1 > max(gained[1::2])
