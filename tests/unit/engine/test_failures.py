"""Failures of a request, a pass, a step or the whole model: which requests get an error."""

from __future__ import annotations

import pytest

from tests.remembering import Remembering, drain, expected_output, generation, submit
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling import running_batch
from tidegate.engine.scheduling.scheduler import FAILURES_IN_A_ROW, Scheduler
from tidegate.errors import EngineError


def test_a_chunk_that_cannot_be_computed_fails_its_request_alone(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_batch, "CHUNK_TOKENS", 16)
    decoder.refuses = 66
    scheduler = Scheduler(decoder, max_slots=3, version="0", deliver=lambda _: None)
    talking = generation([1, 2], 30)
    bad, late = generation([*range(100)], 5), generation([5] * 20, 5)
    submit(scheduler, talking)
    scheduler.run_once()
    submit(scheduler, bad, late)
    drain(scheduler, talking, bad, late)
    assert bad.error is not None
    assert late.output_ids == expected_output(late)
    assert talking.output_ids == expected_output(talking)


def test_a_request_that_cannot_be_computed_fails_alone(
    scheduler: Scheduler, decoder: Remembering, caplog: pytest.LogCaptureFixture
) -> None:
    decoder.refuses = 666
    good = [generation([i + 1, 2, 3], 4) for i in range(3)]
    bad = generation([5, 666, 3], 4)
    submit(scheduler, good[0], bad, *good[1:])
    drain(scheduler, *good, bad)
    assert bad.error is not None
    assert "cannot compute this" in bad.error
    assert [one.output_ids for one in good] == [expected_output(one) for one in good]
    assert all(one.error is None for one in good)


def test_failures_between_which_others_succeed_do_not_end_the_scheduler(
    scheduler: Scheduler, decoder: Remembering
) -> None:
    decoder.refuses = 666
    for number in range(FAILURES_IN_A_ROW):
        bad = generation([number, 666, 3], 4)
        submit(scheduler, bad)
        drain(scheduler, bad)
        assert bad.error is not None
        good = [generation([number, 2, one], 4) for one in range(3)]
        submit(scheduler, *good)
        drain(scheduler, *good)
        assert all(one.error is None for one in good)


def test_a_model_that_fails_on_everything_ends_the_scheduler(decoder: Remembering) -> None:
    decoder.refuses = 1
    deaths: list[str] = []
    scheduler = Scheduler(
        decoder,
        max_slots=8,
        version="0",
        deliver=lambda _: None,
        on_failure=lambda: deaths.append("died"),
    )
    requests = [generation([1, 1], 4) for _ in range(8)]
    submit(scheduler, *requests)
    scheduler.start()
    scheduler._thread.join(10)
    assert deaths == ["died"]
    assert all(one.error for one in requests)


def test_logits_that_are_not_finite_fail_their_own_request(
    scheduler: Scheduler, decoder: Remembering
) -> None:
    decoder.nan_for = 3
    requests = [generation([i, 2], 6) for i in range(5)]
    submit(scheduler, *requests)
    drain(scheduler, *requests)
    assert requests[3].error == "the model's logits are not finite for this request"
    assert requests[3].output_ids == []
    rest = [one for one in requests if one is not requests[3]]
    assert [one.output_ids for one in rest] == [expected_output(one) for one in rest]


def test_when_a_step_fails_all_get_an_error_and_nothing_is_accepted_any_more(
    decoder: Remembering, caplog: pytest.LogCaptureFixture
) -> None:
    delivered: list[Generation] = []
    deaths: list[bool] = []
    scheduler = Scheduler(
        decoder,
        max_slots=2,
        version="0",
        deliver=delivered.extend,
        on_failure=lambda: deaths.append(all(one.error for one in requests)),
    )
    requests = [generation([i, 2], 5) for i in range(4)]
    decoder.dies = True
    submit(scheduler, *requests)
    scheduler.start()
    scheduler._thread.join(10)
    assert deaths == [True]
    assert all(one.error == "the engine ended: out of memory" for one in requests)
    assert sorted(map(id, delivered)) == sorted(map(id, requests))
    with pytest.raises(EngineError, match="out of memory"):
        scheduler.submit(generation([1], 1))
    with pytest.raises(EngineError, match="out of memory"):
        scheduler.call(scheduler.resume)
    assert "Traceback" in caplog.text


def test_a_cancelled_call_does_not_hide_a_failed_step(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[bool] = []
    delivered: list[Generation] = []
    scheduler = Scheduler(
        decoder,
        max_slots=2,
        version="0",
        deliver=delivered.extend,
        on_failure=lambda: deaths.append(True),
    )

    def fail(_: object) -> None:
        scheduler.call(scheduler.resume).cancel()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(decoder, "decode", fail)
    one = generation([1, 2], 5)
    submit(scheduler, one)
    scheduler.start()
    scheduler._thread.join(10)
    assert (deaths, delivered, one.error) == ([True], [one], "the engine ended: out of memory")


def test_stop_ends_requests_in_flight_with_an_error(scheduler: Scheduler) -> None:
    scheduler.call(lambda: scheduler.pause("in_place"))
    one = generation([1, 2], 5)
    submit(scheduler, one)
    scheduler.start()
    scheduler.stop()
    assert one.error == "the engine ended: the engine was stopped"


def test_a_call_that_raises_tells_its_caller_and_harms_no_one(scheduler: Scheduler) -> None:
    one = generation([1, 2], 2)
    submit(scheduler, one)
    result = scheduler.call(lambda: 1 // 0)
    drain(scheduler, one)
    with pytest.raises(ZeroDivisionError):
        result.result(0)
    assert one.error is None


@pytest.mark.parametrize("copy", ["snapshot", "restore"])
def test_a_copy_for_the_prefix_cache_that_fails_leaves_each_request_one_row(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    failed: list[int] = []

    def fail(row: int, *_: object) -> object:
        failed.append(row)
        raise MemoryError("no room for the copy")

    scheduler = Scheduler(
        decoder, max_slots=4, version="0", deliver=lambda _: None, prefix_bytes=1_000_000
    )  # fmt: skip
    if copy == "restore":
        first = generation([*range(40)], 3)
        submit(scheduler, first)
        drain(scheduler, first)
    monkeypatch.setattr(decoder, copy, fail)
    requests = [generation([*range(40), number], 6) for number in range(3)]
    submit(scheduler, *requests)
    while not all(one.ended for one in requests):
        scheduler.run_once()
        assert len(set(map(id, scheduler._rows.owners))) == scheduler.num_running
    assert failed
    assert [one.error for one in requests] == [None] * 3
    assert [one.output_ids for one in requests] == [expected_output(one) for one in requests]
    assert scheduler.counters.tokens_sampled - (3 if copy == "restore" else 0) == 18


def test_weights_that_are_partly_loaded_are_never_sampled_from(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(weights: int) -> None:
        decoder.weights = weights
        raise RuntimeError("an illegal memory access")

    ended: list[bool] = []
    scheduler = Scheduler(
        decoder, max_slots=2, version="0", deliver=lambda _: None, on_failure=lambda: ended.append(True)
    )
    one = generation([1, 2], 5)
    submit(scheduler, one)
    scheduler.run_once()
    scheduler.run_once()
    before = list(one.output_ids)
    monkeypatch.setattr(decoder, "copy_weights", half)
    loading = scheduler.call(lambda: scheduler.load(1, "1", keep_cache=False, abort_all=False))
    scheduler.start()
    scheduler._thread.join(10)
    with pytest.raises(EngineError, match=r"partly loaded.*illegal memory access"):
        loading.result(0)
    assert (ended, one.output_ids) == ([True], before)
    assert one.error is not None
    with pytest.raises(EngineError, match="illegal memory access"):
        scheduler.submit(generation([1], 1))
