import itertools
import tracemalloc
from functools import cmp_to_key

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_group, make_row, make_rows
from tidegate.trainer.batch import packing
from tidegate.trainer.batch.microbatch import PrefixBatch, padding_ratio
from tidegate.trainer.batch.packing import (
    MAX_PADDING_RATIO,
    PREFIX_MEMORY_DIVISOR,
    _cheapest_split,
    microbatches,
    prefix_batches,
)
from tidegate.trainer.batch.rows import TrainingSequence


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingSequence]:
    """Groups with a prompt in common, and single rows, in any order; few ids, so that chance shares too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = make_rows(draw(st.integers(0, 4)), seed=draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(0, 3))):
        rows += make_group(rng, size=draw(st.integers(1, 5)), prompt=draw(st.integers(1, 60)), vocabulary=3)
    if rows and draw(st.booleans()):
        rows[0].mask[:] = False
    rng.shuffle(rows)
    return rows


def beginnings(bundle: PrefixBatch) -> list[list[int]]:
    """The bundle's prefixes, without padding."""
    return [
        ids[:length].tolist()
        for one in bundle.prefixes
        for ids, length in zip(one.ids_pt, one.lengths_p, strict=True)
    ]


def computed(found: list[PrefixBatch]) -> int:
    return sum(one.tokens for bundle in found for one in bundle.passes)


@given(batches(), st.integers(8, 400), st.booleans())
def test_each_row_is_laid_out_once_and_whole(rows, max_tokens, share):
    found = prefix_batches(rows, max_tokens, share=share)
    laid = [index for bundle in found for batch in bundle.microbatches for index in batch.rows]
    assert sorted(laid) == [index for index, row in enumerate(rows) if row.mask.any()]
    for bundle in found:
        known = beginnings(bundle) or [[]]
        for batch in bundle.microbatches:
            for at, index in enumerate(batch.rows):
                row, length = rows[index], int(batch.lengths_b[at])
                prefix = known[int(batch.prefix_b[at])]
                assert len(prefix) == int(batch.starts_b[at])
                assert prefix + batch.ids_bt[at, :length].tolist() == row.ids[: row.inputs].tolist()
                assert not batch.ids_bt[at, length:].any()
                assert batch.positions_bt[at].tolist() == [
                    len(prefix) + offset for offset in range(batch.ids_bt.shape[1])
                ]


@given(batches(), st.integers(8, 400), st.booleans())
def test_each_trained_token_is_predicted_once_with_what_was_recorded(rows, max_tokens, share):
    for bundle in prefix_batches(rows, max_tokens, share=share):
        for batch in bundle.microbatches:
            width = batch.ids_bt.shape[1]
            assert (batch.at_n // width == batch.row_n).all()
            for at, index in enumerate(batch.rows):
                row, here = rows[index], batch.row_n == at
                positions = batch.positions_bt[at][batch.at_n[here] % width]
                assert (positions + 1).tolist() == np.flatnonzero(row.mask).tolist()
                assert (batch.at_n[here] % width < batch.lengths_b[at]).all()
                assert batch.targets_n[here].tolist() == row.ids[row.mask].tolist()
                assert batch.logprobs_n[here].tolist() == row.logprobs[row.mask].tolist()
                assert batch.versions_n[here].tolist() == row.versions[row.mask].tolist()
                assert batch.temperatures_n[here].tolist() == row.temperature[row.mask].tolist()
                assert batch.advantages_n[here].tolist() == row.advantages[row.mask].tolist()
                assert set(batch.weights_n[here].tolist()) == {np.float32(row.weight)}


@given(batches(), st.integers(8, 400), st.booleans())
def test_budgets_hold(rows, max_tokens, share):
    for bundle in prefix_batches(rows, max_tokens, share=share):
        lengths = [len(one) for one in beginnings(bundle)]
        assert sum(lengths) <= max_tokens or len(lengths) == 1
        for one in bundle.prefixes:
            assert one.positions <= max_tokens or len(one.lengths_p) == 1
        for batch in bundle.microbatches:
            held = batch.positions + len(batch.rows) * (batch.prefix_width // PREFIX_MEMORY_DIVISOR)
            assert held <= max_tokens or len(batch.rows) == 1
            assert batch.prefix_width == max(batch.starts_b.tolist())


@given(batches(), st.integers(8, 400))
def test_prefixes_of_one_length_need_no_padding(rows, max_tokens):
    found = prefix_batches(rows, max_tokens, one_length=True)
    for bundle in found:
        for batch in bundle.microbatches:
            assert (batch.starts_b == batch.prefix_width).all()
    laid = [index for bundle in found for batch in bundle.microbatches for index in batch.rows]
    assert sorted(laid) == [index for index, row in enumerate(rows) if row.mask.any()]
    assert computed(found) == computed(prefix_batches(rows, max_tokens))


@given(batches())
def test_sharing_prefixes_never_computes_more_tokens(rows):
    alone = prefix_batches(rows, 4096, share=False)
    assert all(not bundle.prefixes for bundle in alone)
    assert computed(alone) == sum(row.inputs for row in rows if row.mask.any())
    assert computed(prefix_batches(rows, 4096)) <= computed(alone)


def test_a_groups_prompt_is_computed_once():
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=8, prompt=prompt) for prompt in (50, 80)]
    (bundle,) = prefix_batches([row for group in groups for row in group], 4096)
    # The prompt's last token predicts the first trained one, so it stays with the rows.
    expected = [group[0].ids[: prompt - 1].tolist() for group, prompt in zip(groups, (50, 80), strict=True)]
    assert sorted(beginnings(bundle), key=len) == expected
    rows = sum(row.inputs for group in groups for row in group)
    assert computed([bundle]) == rows - 7 * 49 - 7 * 79


@given(batches(), st.integers(0, 2**32))
def test_rows_with_equal_beginnings_are_neighbours(rows, seed):
    """Also those computed by the same experts."""
    rng = np.random.default_rng(seed)
    for row in rows:
        row.experts = rng.integers(0, 2, (len(row.ids), 2)).astype(np.uint16)
    found = [
        [number for token in zip(row.ids, *row.experts.T, strict=True) for number in token]
        for row in sorted(rows, key=cmp_to_key(packing._compare))
    ]
    assert found == sorted(found)


def test_prefixes_are_found_without_a_copy_of_the_experts():
    rows = make_rows(40, shortest=400, longest=500)
    for row in rows:
        row.experts = np.zeros((len(row.ids), 200), np.uint16)
    tracemalloc.start()
    packing._clusters(rows, range(len(rows)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.2 * sum(row.experts.nbytes for row in rows)


def test_sub_agents_share_among_themselves():
    """A group whose rows have two kinds of prompt with a short beginning in common."""
    rng = np.random.default_rng(0)
    one, other = make_group(rng, size=4, prompt=60), make_group(rng, size=4, prompt=40)
    for row in other:
        row.ids[:10] = one[0].ids[:10]
    (bundle,) = prefix_batches([*one, *other], 4096)
    assert sorted(map(len, beginnings(bundle))) == [39, 59]


def test_the_prefixes_of_a_bundle_are_bounded():
    rng = np.random.default_rng(0)
    rows = [row for _ in range(5) for row in make_group(rng, size=4, prompt=51)]
    found = prefix_batches(rows, 120)
    assert [len(beginnings(bundle)) for bundle in found] == [2, 2, 1]
    (long,) = prefix_batches(make_group(rng, size=4, prompt=300), 120)
    assert len(beginnings(long)) == 1


def test_a_short_common_prefix_is_not_shared():
    rng = np.random.default_rng(0)
    rows = make_group(rng, size=4, prompt=20, replies=(300, 400))
    (bundle,) = prefix_batches(rows, 4096)
    assert bundle.prefixes == []


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7).map(lambda lengths: sorted(lengths, reverse=True)),
    st.integers(1, 90),
    st.integers(0, 60),
)
def test_microbatches_have_the_least_cost(lengths, max_tokens, overhead):
    def cost(cuts):
        runs = [lengths[start:end] for start, end in cuts]
        if any(len(run) > 1 and len(run) * run[0] > max_tokens for run in runs):
            return float("inf")
        return sum(len(run) * run[0] + overhead for run in runs)

    count = len(lengths)
    inner = range(1, count)
    every = (
        list(itertools.pairwise((0, *chosen, count)))
        for size in range(count)
        for chosen in itertools.combinations(inner, size)
    )
    cuts = _cheapest_split(lengths, max_tokens, overhead)
    assert [one for start, end in cuts for one in range(start, end)] == list(range(count))
    assert cost(cuts) == min(map(cost, every))


@given(batches(), st.booleans())
def test_padding_is_bounded(rows, share):
    found = prefix_batches(rows, 4096, share=share)
    assert padding_ratio(one for bundle in found for one in bundle.passes) <= MAX_PADDING_RATIO + 1e-9


@pytest.mark.parametrize("share", [True, False])
def test_padding_of_typical_rows_is_little(share):
    rng = np.random.default_rng(0)
    groups = [make_group(rng, size=8, prompt=int(rng.integers(50, 90)), replies=(25, 70)) for _ in range(16)]
    found = prefix_batches([row for group in groups for row in group], 8192, share=share)
    assert padding_ratio(one for bundle in found for one in bundle.passes) <= 0.05
    assert bool(found[0].prefixes) is share


def test_padding_of_a_heavy_tail_is_little():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, shortest=100, longest=int(rng.choice([150, 400, 2000]))) for _ in range(128)]
    assert padding_ratio(PrefixBatch([], microbatches(rows, range(128), 8192)).passes) <= 0.05
    assert padding_ratio([]) == 0.0


def test_a_row_longer_than_a_microbatch_goes_alone():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, shortest=90, longest=90), *(make_row(rng, shortest=8, longest=8) for _ in range(4))]
    layout = sorted(sorted(batch.rows) for batch in microbatches(rows, range(5), 64))
    assert layout == [[0], [1, 2, 3, 4]]


def test_the_layout_is_the_same_each_time():
    rng = np.random.default_rng(0)
    rows = [row for _ in range(5) for row in make_group(rng, size=4, prompt=30)]
    first, second = (
        [(batch.rows, batch.ids_bt) for bundle in prefix_batches(rows, 200) for batch in bundle.microbatches]
        for _ in range(2)
    )
    assert len(first) > 1
    for (some, ids), (same, again) in zip(first, second, strict=True):
        assert some == same
        assert torch.equal(ids, again)
