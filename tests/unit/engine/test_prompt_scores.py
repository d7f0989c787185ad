"""Requests for logprobs of the prompt in the scheduler, over a decoder that records its calls."""

from __future__ import annotations

import pytest

from tests.remembering import Remembering, drain, expected_output, generation, submit
from tidegate.engine.scheduling.scheduler import Scheduler


def test_requests_that_are_scored_take_no_row_and_disturb_none(
    scheduler: Scheduler, decoder: Remembering
) -> None:
    sampling = [generation([i, 2, 3], 9) for i in range(3)]
    scored = [generation([i, 4, 5, 6], 0, logprob_start=1) for i in range(6)]
    both = generation([9, 8, 7, 6], 4, logprob_start=0)
    submit(scheduler, scored[0], sampling[0], both, scored[1], sampling[1], sampling[2], *scored[2:])
    drain(scheduler, *sampling, *scored, both)
    assert [one.prompt_logprobs for one in scored] == [[-5.0, -6.0]] * 6
    assert both.prompt_logprobs == [-8.0, -7.0, -6.0]
    assert [one.output_ids for one in (*sampling, both)] == [
        expected_output(one) for one in (*sampling, both)
    ]
    assert all(one.output_ids == [] for one in scored)


def test_requests_for_likeliest_ids_are_computed_apart_and_in_pieces(
    scheduler: Scheduler, decoder: Remembering
) -> None:
    asked = [generation([i, 4, 5, 6], 0, logprob_start=1, top_logprobs=i % 3) for i in range(6)]
    long = generation(list(range(200)), 0, logprob_start=3, top_logprobs=2)
    submit(scheduler, *asked, long)
    drain(scheduler, *asked, long)
    for one in asked:
        top = [[(-float(id), id + at) for at in range(one.top_logprobs)] for id in (5, 6)]
        assert one.prompt_top == (top if one.top_logprobs else [])
    assert long.prompt_top == [[(-float(id), id), (-float(id), id + 1)] for id in range(4, 200)]


def test_a_long_prompt_is_scored_in_pieces(scheduler: Scheduler, decoder: Remembering) -> None:
    one = generation(list(range(200)), 0, logprob_start=3)
    submit(scheduler, one)
    drain(scheduler, one)
    assert one.prompt_logprobs == [-float(token) for token in range(4, 200)]
    assert max(map(sum, decoder.prefills)) <= decoder.max_scored_tokens


def test_a_prefix_is_reused_up_to_the_first_token_that_is_scored(decoder: Remembering) -> None:
    scheduler = Scheduler(decoder, max_slots=4, version="0", prefix_bytes=10_000, deliver=lambda _: None)
    ids = list(range(50))
    for start, reused in ((40, 0), (40, 32), (10, 0), (49, 49)):
        one = generation(ids, 0, logprob_start=start)
        submit(scheduler, one)
        drain(scheduler, one)
        assert one.cached_tokens == reused
        assert one.prompt_logprobs == [-float(token) for token in ids[start + 1 :]]


@pytest.mark.parametrize("limit", [0, 3])
def test_a_value_that_is_not_finite_fails_its_request_alone(
    scheduler: Scheduler, decoder: Remembering, limit: int
) -> None:
    decoder.nan_for = 7
    bad, good = generation([7, 1, 2], limit, logprob_start=0), generation([8, 1, 2], limit, logprob_start=0)
    submit(scheduler, bad, good)
    drain(scheduler, bad, good)
    assert bad.error is not None
    assert "not finite" in bad.error
    assert good.error is None
    assert decoder.cleaned
