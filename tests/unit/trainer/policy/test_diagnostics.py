import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.trainer.learning_fixtures import lay, make_rows
from tidegate.trainer.batch.microbatch import Microbatch
from tidegate.trainer.policy.diagnostics import Diagnostics, distance_metrics


def none_cut(batch: Microbatch) -> torch.Tensor:
    return torch.zeros(len(batch.at_n), dtype=torch.bool)


def test_diagnostics_are_their_formulas_over_all_microbatches():
    rows = make_rows(9)
    rng = np.random.default_rng(1)
    found = Diagnostics(version=3)
    gaps, versions, entropies, products = [], [], [], []
    for batch in lay(rows, 64):
        gap = rng.normal(0, 0.7, len(batch.at_n))
        entropy = rng.random(len(batch.at_n))
        found.add(
            batch.logprobs_n.double() + torch.tensor(gap),
            torch.tensor(entropy),
            torch.tensor(gap > math.log(1.5)),
            batch,
        )
        products += [math.prod(np.exp(gap[batch.row_n == at])) for at in range(len(batch.rows))]
        gaps.append(gap), versions.append(batch.versions_n.numpy()), entropies.append(entropy)
    gap, version, entropy = map(np.concatenate, (gaps, versions, entropies))
    ratio = np.exp(gap)
    k3 = ratio - 1 - gap
    expected = {
        "mismatch_kl": k3[version == 3].mean(),
        "lag_kl": k3.mean(),
        "logprob_drift": np.abs(gap).mean(),
        "entropy": entropy.mean(),
        "clip_fraction": (ratio > 1.5).mean(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "ess_rows": sum(products) ** 2 / (len(products) * sum(one**2 for one in products)),
        "logprob_max_error": np.abs(gap[version == 3]).max(),
    }
    assert len(products) == 9
    assert distance_metrics([found.totals()]) == pytest.approx(expected)


def test_listed_ids_show_the_mass_outside_and_the_tokens_that_centering_moves() -> None:
    (batch,) = lay(make_rows(1), 4096)
    count = len(batch.logprobs_n)
    listed_nk = torch.tensor([[0.5, 0.25]]).log().expand(count, 2).clone()
    policy_nk = listed_nk.clone()
    policy_nk[0] = torch.tensor([0.75, 0.0]).log()  # the same rest, but other ids
    policy_nk[1] = torch.tensor([0.4, 0.2]).log()  # a larger rest
    policy_nk[2] = torch.tensor([0.502, 0.252]).log()  # by 0.008 in total
    batch = replace(batch, sampler_listed_nk=listed_nk, policy_listed_nk=policy_nk)
    found = Diagnostics(version=3)
    found.add(batch.logprobs_n, torch.zeros(count), none_cut(batch), batch)
    metrics = distance_metrics([found.totals()])
    assert metrics["unlisted_mass"] == pytest.approx(0.25)
    assert metrics["centered_fraction"] == pytest.approx(2 / count)


def test_without_tokens_of_its_own_version_the_mismatch_is_unknown():
    (batch,) = lay(make_rows(1), 4096)
    found = Diagnostics(version=99)
    found.add(batch.logprobs_n, torch.zeros_like(batch.logprobs_n), none_cut(batch), batch)
    metrics = distance_metrics([found.totals()])
    assert math.isnan(metrics["mismatch_kl"])
    assert math.isnan(metrics["logprob_max_error"])
    assert (metrics["lag_kl"], metrics["ess"], metrics["clip_fraction"]) == (0, pytest.approx(1), 0)


def test_one_impossible_token_does_not_turn_the_figures_into_infinities():
    (batch,) = lay(make_rows(1), 4096)
    batch.logprobs_n[0] = -float("inf")
    found = Diagnostics(version=99)
    found.add(
        torch.full_like(batch.logprobs_n, -1.0), torch.zeros_like(batch.logprobs_n), none_cut(batch), batch
    )
    metrics = distance_metrics([found.totals()])
    assert all(math.isfinite(metrics[name]) for name in ("lag_kl", "ess", "ess_rows", "clip_fraction"))
