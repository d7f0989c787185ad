"""The scheduler: sampling, delivery, pause, abort, and the version of each token."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remembering import Remembering, between_steps, drain, expected_output, generation, submit
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.scheduler import Scheduler


@pytest.fixture
def delivered() -> list[list[Generation]]:
    return []


@pytest.fixture
def scheduler(decoder: Remembering, delivered: list[list[Generation]]) -> Scheduler:
    return Scheduler(decoder, max_slots=4, version="0", deliver=delivered.append)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("turn"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("retract"), st.just(0), st.just(0)),
        st.tuples(st.just("load"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions, st.sampled_from([0, 400, 10_000]))
def test_whatever_happens_every_request_ends_once_with_its_own_tokens(
    todo: list[tuple[str, int, int]], prefix_bytes: int
) -> None:
    decoder = Remembering()
    delivered: list[list[Generation]] = []
    scheduler = Scheduler(
        decoder, max_slots=3, version="0", prefix_bytes=prefix_bytes, deliver=delivered.append
    )
    everything: list[Generation] = []
    versions = itertools.count(1)
    for kind, a, b in todo:
        if kind == "submit":
            former = everything[a] if a < len(everything) else None  # some go on where others were
            prompt = former.prompt_ids + former.output_ids + [a] if former else [a % 3, *range(a)]
            one = generation(prompt, b, rid=f"job-{len(everything)}", top_logprobs=a % 3)
            everything.append(one)
            submit(scheduler, one)
            scheduler.run_once()
        elif kind == "turn":
            for _ in range(a if scheduler.num_running or scheduler.num_waiting else 0):
                if scheduler.num_running or scheduler.num_waiting:
                    scheduler.run_once()
        elif kind == "abort":
            between_steps(scheduler, lambda a=a: scheduler.abort(f"job-{a}"))
        elif kind == "retract":
            between_steps(scheduler, lambda: scheduler.pause("retract"))
            between_steps(scheduler, scheduler.resume)
        else:
            version = next(versions)
            load = partial(scheduler.load, version, str(version), keep_cache=False, abort_all=False)
            between_steps(scheduler, load)
    drain(scheduler, *everything)

    ended = [one for batch in delivered for one in batch]
    assert sorted(map(id, ended)) == sorted(map(id, everything))
    for one in everything:
        assert one.error is None
        assert one.finish_reason is not None
        assert len(one.output_ids) == one.limit or one.finish_reason["type"] == "abort"
        assert one.output_ids == expected_output(one)
        assert sum(end - start for _, start, end in one.spans) == len(one.output_ids) == len(one.logprobs)
        listed = [[(-float(id + at), id + at) for at in range(one.top_logprobs)] for id in one.output_ids]
        found = [row.tolist() for row in one.output_top]
        assert found == (listed if one.top_logprobs else []), "of its own row and step"
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_one_delivery_a_step(scheduler: Scheduler, delivered: list[list[Generation]]) -> None:
    requests = [generation([i + 1], 3) for i in range(4)]
    submit(scheduler, *requests)
    drain(scheduler, *requests)
    assert delivered == [requests[::-1]]


def test_streaming_requests_are_woken_at_every_token(
    scheduler: Scheduler, delivered: list[list[Generation]]
) -> None:
    one = generation([1, 2], 4, stream=True)
    submit(scheduler, one)
    drain(scheduler, one)
    assert delivered == [[one]] * 4


def test_abort_is_by_prefix(scheduler: Scheduler) -> None:
    requests = [
        generation([1, 2], 50, rid=rid) for rid in ("job-1", "job-12", "other", "job-1x", "job-2", "o")
    ]
    submit(scheduler, *requests)
    scheduler.run_once()
    scheduler.run_once()
    assert scheduler.abort("job-1") == 3  # one of them still waits for a row
    assert [one.rid for one in requests if one.ended] == ["job-1", "job-12", "job-1x"]
    assert requests[0].finish_reason == {"type": "abort", "message": "aborted"}
    assert len(requests[0].output_ids) == 1
    drain(scheduler, *requests)
    assert {len(one.output_ids) for one in requests if not one.rid.startswith("job-1")} == {50}


def test_requests_of_one_token_are_aborted_before_their_first_step(scheduler: Scheduler) -> None:
    """Nothing of them is in the cache yet, so the last row that moves into a freed one has no values."""
    requests = [generation([token], 3) for token in range(3)]
    submit(scheduler, *requests)
    scheduler.run_once()
    between_steps(scheduler, lambda: scheduler._abort(requests[:2]))
    drain(scheduler, *requests)
    assert [one.output_ids for one in requests[:2]] == [[], []]
    assert requests[2].output_ids == expected_output(requests[2])


def test_pause_abort_ends_all_with_what_they_have(scheduler: Scheduler) -> None:
    requests = [generation([1, 2], 50) for _ in range(6)]
    submit(scheduler, *requests)
    for _ in range(4):
        scheduler.run_once()
    scheduler.pause("abort")
    assert all(one.ended for one in requests)
    assert [len(one.output_ids) for one in requests] == [3] * 4 + [0] * 2
    assert [one.spans for one in requests] == [[("0", 0, 3)]] * 4 + [[]] * 2


def test_new_requests_wait_until_resumed(scheduler: Scheduler) -> None:
    scheduler.pause("retract")
    one = generation([1, 2], 2)
    submit(scheduler, one)
    scheduler.run_once()
    assert (scheduler.num_waiting, one.output_ids) == (1, [])
    scheduler.resume()
    drain(scheduler, one)


def test_retracted_requests_come_back_before_those_that_waited(
    scheduler: Scheduler, decoder: Remembering
) -> None:
    early = [generation([i + 1] * 5, 20, rid=f"early-{i}") for i in range(4)]
    late = [generation([9] * 5, 20, rid="late")]
    submit(scheduler, *early, *late)
    for _ in range(3):
        scheduler.run_once()
    scheduler.pause("retract")
    assert [one.rid for one in scheduler._waiting] == [
        "early-0",
        "early-1",
        "early-2",
        "early-3",
        "late",
    ]
    scheduler.resume()
    scheduler.run_once()
    assert decoder.prefills == [[4] * 4, [6] * 4]


def test_a_rid_in_use_is_refused_and_the_first_request_continues(scheduler: Scheduler) -> None:
    first, second = generation([1, 2], 5, rid="a"), generation([1, 2], 5, rid="a")
    submit(scheduler, first, second)
    drain(scheduler, first, second)
    assert (second.refused, second.error) == (True, "rid 'a' is in use")
    assert len(first.output_ids) == 5
    again = generation([1, 2], 5, rid="a")
    submit(scheduler, again)
    drain(scheduler, again)
    assert again.error is None


def test_flush_is_refused_while_rows_are_held(scheduler: Scheduler, decoder: Remembering) -> None:
    one = generation([1, 2], 5)
    submit(scheduler, one)
    scheduler.run_once()
    assert scheduler.flush() is False
    scheduler.pause("retract")
    assert scheduler.flush() is True
    assert decoder.rows == {}


def test_relabelling_keeps_what_was_sampled(scheduler: Scheduler) -> None:
    one = generation([1, 2], 4)
    submit(scheduler, one)
    for _ in range(3):
        scheduler.run_once()
    scheduler.relabel("8")
    drain(scheduler, one)
    assert one.spans == [("0", 0, 2), ("8", 2, 4)]
