"""Counter-based uniform numbers, and the tokens drawn with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tidegate.engine.model.sampling import _inverse_cdf, sample, uniforms
from tidegate.engine.requests.params import SamplingParams
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.slots import Slots


def slots_of(*params: SamplingParams, outputs: list[int] | None = None) -> Slots:
    slots = Slots(len(params))
    for one in params:
        slots.add(Generation("", [0], one, 1, output_ids=outputs or []))
    return slots


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(500)
    positions = np.tile(np.arange(500, dtype=np.uint64), 200)
    draws = uniforms(seeds, positions)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # χ² with 99 degrees of freedom: p < 1e-4
    table = draws.reshape(200, 500)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert uniforms(seeds[777:778], positions[777:778])[0] == draws[777]


def test_ids_without_probability_are_never_drawn() -> None:
    logits = torch.full((400, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 4] = 0.0
    ids, logprobs = sample(logits, slots_of(*(SamplingParams(seed=i) for i in range(400))))
    assert set(ids.tolist()) == {2, 4}
    np.testing.assert_allclose(logprobs, np.log(0.5), rtol=1e-6)


def test_a_draw_of_zero_takes_the_first_id_that_has_probability() -> None:
    logprobs = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    assert _inverse_cdf(logprobs, torch.zeros(1, dtype=torch.float64)).tolist() == [2]
    logprobs = torch.full((1, 700), -torch.inf)
    logprobs[0, 300] = 0.0
    assert _inverse_cdf(logprobs, torch.zeros(1, dtype=torch.float64)).tolist() == [300]


def test_draws_at_every_edge_take_an_id_that_has_probability() -> None:
    """Draws on, just below and just above the sum of the first ids: no rounding leads to an id of none."""
    torch.manual_seed(0)
    logprobs = torch.randn(1, 1000) * 4
    logprobs[0, torch.rand(1000) < 0.5] = -torch.inf
    logprobs = torch.log_softmax(logprobs, -1)
    sums = logprobs.double().exp().cumsum(-1)[0]
    edges = sums / sums[-1]
    zero, one = torch.zeros_like(edges), torch.ones_like(edges)
    draws = torch.cat([edges, torch.nextafter(edges, zero), torch.nextafter(edges, one)])
    draws = draws.clamp(max=1 - 2.0**-52)  # what `uniforms` gives is not more
    ids = _inverse_cdf(logprobs.expand(len(draws), -1), draws)
    assert logprobs[0, ids].isfinite().all()


def test_a_row_that_is_not_finite_gets_some_id() -> None:
    logprobs = torch.full((2, 300), torch.nan)
    logprobs[1] = torch.log_softmax(torch.zeros(300), -1)
    ids = _inverse_cdf(logprobs, torch.full((2,), 0.5, dtype=torch.float64))
    assert 0 <= ids[0] < 300
    assert ids[1] in (149, 150)


def test_logprobs_are_those_of_the_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    params = [SamplingParams(temperature=t, seed=9) for t in (0.5, 2.0, 0.0)]
    ids, logprobs = sample(logits, slots_of(*params))
    for row, scale in enumerate((0.5, 2.0, 1.0)):
        expected = torch.log_softmax(logits[row].double() / scale, -1)[ids[row]]
        assert abs(float(expected) - logprobs[row]) < 1e-5
    assert ids[2] == int(logits[2].argmax())


def test_likeliest_ids_are_those_of_the_distribution_that_is_sampled() -> None:
    """After the temperature, as the sampled logprob, and before top-p; ids without probability are finite."""
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 3
    logits[2, 2:] = -torch.inf
    slots = Slots(3)
    for row, (temperature, listed) in enumerate(((0.5, 4), (2.0, 0), (1.0, 3))):
        params = SamplingParams(temperature=temperature, top_p=0.5, seed=row)
        slots.add(Generation("", [0], params, 1, top_logprobs=listed))
    ids, logprobs = sample(logits.clone(), slots)
    expected = torch.log_softmax(logits[0].double() / 0.5, -1).topk(4)
    top = slots.top[0]
    assert top["id"].tolist() == expected.indices.tolist()
    assert top["logprob"] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert top["logprob"][top["id"].tolist().index(ids[0])] == logprobs[0]
    assert sorted(slots.top[2]["id"][:2]) == [0, 1]
    assert slots.top[2]["logprob"][2] == -9999.0
    slots.listed[:] = 0
    again = sample(logits, slots)
    assert (again[0].tolist(), again[1].tolist()) == (ids.tolist(), logprobs.tolist()), "as without a list"


@pytest.mark.parametrize(
    "narrowing", [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}]
)
def test_kept_ids_are_all_that_can_be_drawn_with_logprobs_among_them(narrowing: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 30).repeat(400, 1)
    slots = Slots(400)
    for row in range(400):
        params = SamplingParams(temperature=0.8, seed=row, **narrowing)
        slots.add(Generation("", [0], params, 1, sampling_mask=row != 7))
    ids, logprobs = sample(logits.clone(), slots)
    assert 7 not in slots.kept, "it is not asked for there"
    [kept] = {tuple(sorted(one)) for _, one in slots.kept.values()}
    assert set(ids.tolist()) == set(kept), "400 draws of few ids"
    whole = torch.log_softmax(logits[0].double() / 0.8, -1)
    among = torch.log_softmax(whole[list(kept)], -1)
    for row, (logprob, _) in slots.kept.items():
        assert logprob == pytest.approx(float(among[kept.index(int(ids[row]))]), abs=1e-5)
    assert logprobs == pytest.approx(whole[ids].numpy(), abs=1e-5), "those of all ids, as before"


def test_rows_that_are_not_finite_say_so_and_leave_the_others_alone() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 3] = torch.nan
    ids, logprobs = sample(logits, slots_of(*(SamplingParams(seed=i) for i in range(3))))
    assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert ((ids >= 0) & (ids < 5)).all()


def test_a_nucleus_keeps_at_least_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]]).repeat(50, 1)
    ids, _ = sample(logits, slots_of(*(SamplingParams(top_p=1e-6, seed=i) for i in range(50))))
    assert set(ids.tolist()) == {1}


def test_top_k_of_one_is_greedy_and_beyond_the_vocabulary_is_off() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 20).repeat(300, 1)
    ids, _ = sample(logits, slots_of(*(SamplingParams(top_k=1, seed=i) for i in range(300))))
    assert set(ids.tolist()) == {int(logits[0].argmax())}
    ids, _ = sample(logits, slots_of(*(SamplingParams(top_k=500, seed=i) for i in range(300))))
    assert len(set(ids.tolist())) > 10


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    probs = torch.tensor([0.5, 0.26, 0.14, 0.1])
    logits = probs.log().repeat(400, 1)
    params = [SamplingParams(min_p=0.27, seed=i) for i in range(400)]
    ids, logprobs = sample(logits, slots_of(*params))
    assert set(ids.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(logprobs, probs.log()[ids], rtol=1e-5)  # of the whole distribution
    ids, _ = sample(logits, slots_of(*(SamplingParams(min_p=1, seed=i) for i in range(400))))
    assert set(ids.tolist()) == {0}
    # Measured after the temperature: at 0.5 the second is 0.27 times as likely as the first.
    ids, _ = sample(
        logits, slots_of(*(SamplingParams(min_p=0.28, temperature=0.5, seed=i) for i in range(400)))
    )
    assert set(ids.tolist()) == {0}
    # Against the likeliest of all, whatever top-k and top-p left.
    narrowed = [SamplingParams(min_p=0.27, top_k=2, top_p=0.99, seed=i) for i in range(400)]
    ids, _ = sample(logits, slots_of(*narrowed))
    assert set(ids.tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_penalties_act_on_the_logits_of_sampled_ids_before_the_temperature(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6) * 2
    outputs = [1, 4, 1, 1, 5]
    params = SamplingParams(
        temperature=temperature, frequency_penalty=0.7, presence_penalty=-0.2, repetition_penalty=1.3, seed=3
    )
    expected = logits.double().clone()
    for token in set(outputs):  # as the formula has it, one by one
        value = expected[token] - 0.7 * outputs.count(token) + 0.2
        expected[token] = value * 1.3 if value < 0 else value / 1.3
    expected = torch.log_softmax(expected / (temperature or 1), -1)
    batch = torch.stack([logits, logits])
    ids, logprobs = sample(batch, slots_of(params, params, outputs=outputs))
    assert abs(float(expected[ids[0]]) - logprobs[0]) < 1e-5
    if temperature == 0:
        assert ids[0] == int(expected.argmax())


def test_penalties_of_one_row_leave_the_others_alone_and_count_no_prompt() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9)
    plain = torch.log_softmax(logits, -1)
    slots = slots_of(SamplingParams(repetition_penalty=2.0, seed=1), SamplingParams(seed=1))
    ids, logprobs = sample(logits.clone(), slots)  # nothing sampled yet; the prompt has id 0
    for row in range(2):
        assert abs(float(plain[row, ids[row]]) - logprobs[row]) < 1e-6
    slots.owners[0].output_ids.append(3)
    ids, logprobs = sample(logits.clone(), slots)
    assert abs(float(plain[1, ids[1]]) - logprobs[1]) < 1e-6


def test_a_row_takes_its_penalties_with_it_when_it_moves() -> None:
    slots = slots_of(SamplingParams(), SamplingParams(min_p=0.3, presence_penalty=1.0))
    slots.remove(0)
    assert (bool(slots.has_processors[0]), float(slots.min_ps[0])) == (True, np.float32(0.3))
