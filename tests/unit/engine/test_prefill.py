"""Prefill passes: which prompts share one, how long one may be, and what runs between two."""

from __future__ import annotations

import pytest

from tests.remembering import Remembering, drain, expected_output, generation, submit
from tidegate.engine.scheduling import running_batch
from tidegate.engine.scheduling.scheduler import Scheduler


def test_prefill_batches_are_bounded_and_of_like_length(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_batch, "PASS_TOKENS", 210)
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 60)
    scheduler = Scheduler(decoder, max_slots=10, version="0", deliver=lambda _: None)
    lengths = [101, 11, 91, 12, 10, 99, 13, 14, 15, 16]
    requests = [generation([1] * length, 9) for length in lengths]
    submit(scheduler, *requests)
    drain(scheduler, *requests)
    # Like goes with like; once some decode, a pass has 60 tokens, and what is longer takes several;
    # seven who wait for a pass that keeps two waiting have 60 · 7 / 2.
    assert decoder.prefills == [[100, 90], [10, 11, 9, 12, 13, 14, 15], [60], [38]]
    assert [one.output_ids for one in requests] == [expected_output(one) for one in requests]


def test_a_long_prompt_never_stands_between_two_tokens_with_more_than_a_chunk(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in passes of the model, not in time."""
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 32)
    scheduler = Scheduler(decoder, max_slots=6, version="0", deliver=lambda _: None)
    talking = generation([1, 2, 3], 60)
    submit(scheduler, talking)
    scheduler.run_once()
    scheduler.run_once()
    others = [generation([9] * 500, 5), *(generation([i] * 30, 5) for i in range(3))]
    submit(scheduler, *others)
    gaps, computed = [], 0
    while not talking.ended:
        before, sampled = len(decoder.prefills), len(talking.output_ids)
        scheduler.run_once()
        computed += sum(max(one) * len(one) for one in decoder.prefills[before:])
        if len(talking.output_ids) > sampled:
            gaps.append(computed)
            computed = 0
    assert max(gaps) <= 32
    assert sum(gaps) == 499 + 3 * 29
    drain(scheduler, *others)
    assert [one.output_ids for one in others] == [expected_output(one) for one in others]


@pytest.mark.parametrize("disturbance", ["abort", "retract", "load", "relabel", "leave"])
def test_a_prompt_that_is_half_computed_may_be_disturbed(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch, disturbance: str
) -> None:
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 16)
    scheduler = Scheduler(decoder, max_slots=3, version="0", prefix_bytes=10_000, deliver=lambda _: None)
    talking = [generation([1, 2], 12), generation([3, 4], 30)]
    submit(scheduler, *talking)
    scheduler.run_once()
    long = generation([*range(100)], 5, rid="long")
    submit(scheduler, long)
    while sum(map(sum, decoder.prefills)) < 40:
        scheduler.run_once()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    match disturbance:
        case "abort":
            scheduler.abort("long")
        case "retract":
            scheduler.pause("retract")
            scheduler.resume()
        case "load":
            scheduler.pause("in_place")
            scheduler.load(1, "1", keep_cache=True, abort_all=False)
            scheduler.abort_one(talking[1])  # its old keys are its own
            scheduler.abort_one(talking[0])
            scheduler.resume()
        case "relabel":
            scheduler.relabel("0")
        case "leave":
            scheduler.abort_one(talking[0])
    late = generation([*range(50), 7], 5)
    submit(scheduler, late)
    drain(scheduler, *talking, long, late)
    assert late.output_ids == expected_output(late)
    assert long.output_ids == expected_output(long)
    assert len(long.output_ids) == (0 if disturbance == "abort" else 5)
    assert long.cached_tokens == 0


def test_the_first_in_the_queue_is_never_passed_over(decoder: Remembering) -> None:
    scheduler = Scheduler(decoder, max_slots=8, version="0", deliver=lambda _: None)
    long = generation([1] * 300, 5)
    submit(scheduler, generation([2, 2], 40), long)
    for i in range(12):
        submit(scheduler, generation([i, 3], 40))
        scheduler.run_once()
    assert long.ended


def test_a_prompt_of_one_token_needs_no_prefill(scheduler: Scheduler, decoder: Remembering) -> None:
    one = generation([7], 3)
    submit(scheduler, one)
    drain(scheduler, one)
    assert decoder.prefills == []
    assert one.output_ids == expected_output(one)


def test_the_prompt_of_a_group_is_computed_once(decoder: Remembering) -> None:
    scheduler = Scheduler(decoder, max_slots=8, version="0", prefix_bytes=10_000, deliver=lambda _: None)
    group = [generation([*range(37)], 5) for _ in range(8)]
    submit(scheduler, *group)
    drain(scheduler, *group)
    assert [one.output_ids for one in group] == [expected_output(one) for one in group]
    assert (scheduler.counters.tokens_prefilled, scheduler.counters.tokens_reused) == (36, 7 * 36)
    assert len(decoder.prefills) == 1
