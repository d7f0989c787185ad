"""The scheduler over a decoder that remembers: its "cache" holds the tokens themselves, so a row
that is moved, dropped or computed again wrongly gives another next token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.engine import rows
from tidegate.engine.params import SamplingParams
from tidegate.engine.requests import Generation
from tidegate.engine.scheduler import Scheduler
from tidegate.engine.slots import Slots
from tidegate.errors import EngineError

VOCAB = 1000


def next_token(tokens: Sequence[int], weights: int) -> int:
    return hash((weights, *tokens)) % VOCAB


class Copied(list[tuple[int, int]]):
    nbytes = 100


class Remembering:
    """Rows of (token, weights it was computed with).

    Faults: `refuses` fails prefills that hold a token, `nan_for` gives NaN to prompts that begin with
    one, `dies` fails every step.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.weights = 0
        self.refuses: int | None = None
        self.nan_for: int | None = None
        self.dies = False
        self.prefills: list[list[int]] = []
        self.cleaned: list[int] = []

    def prefill(self, first: int, sequences: Sequence[Sequence[int]], held: Sequence[int]) -> None:
        if any(self.refuses in sequence for sequence in sequences):
            raise RuntimeError("cannot compute this")
        self.prefills.append([len(sequence) for sequence in sequences])
        for row, (sequence, length) in enumerate(zip(sequences, held, strict=True), first):
            self._write(row, length, sequence)

    def _write(self, row: int, length: int, tokens: Sequence[int]) -> None:
        past = self.rows.get(row, [])[:length]
        assert len(past) == length
        self.rows[row] = past + [(token, self.weights) for token in tokens]

    def decode(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        if self.dies:
            raise RuntimeError("out of memory")
        ids, logprobs = [], []
        for row in range(slots.count):
            self._write(row, int(slots.lengths[row]), [int(slots.tokens[row])])
            tokens = [token for token, _ in self.rows[row]]
            stale = any(weights != self.weights for _, weights in self.rows[row])
            ids.append(-1 if stale else next_token(tokens, self.weights))
            logprobs.append(float("nan") if self.nan_for == tokens[0] else -float(self.weights))
        return np.array(ids), np.array(logprobs)

    def move(self, source: int, target: int, length: int) -> None:
        self.rows[target] = self.rows[source][:length]

    def snapshot(self, row: int, length: int) -> Copied:
        assert len(self.rows[row]) >= length
        return Copied(self.rows[row][:length])

    def restore(self, row: int, snapshot: Copied, length: int) -> None:
        self.rows[row] = snapshot[:length]

    def clean(self, row: int) -> None:
        self.rows[row] = []
        self.cleaned.append(row)

    def drop_cache(self) -> None:
        self.rows.clear()

    def copy_weights(self, weights: Any) -> None:
        self.weights = weights


def generation(prompt: Sequence[int], limit: int = 5, rid: str = "", **more: Any) -> Generation:
    return Generation(
        rid or f"r{id(object())}-{random.random()}", list(prompt), SamplingParams(), limit, **more
    )


@pytest.fixture
def decoder() -> Remembering:
    return Remembering()


@pytest.fixture
def delivered() -> list[list[Generation]]:
    return []


@pytest.fixture
def scheduler(decoder: Remembering, delivered: list[list[Generation]]) -> Scheduler:
    return Scheduler(decoder, max_slots=4, version="0", deliver=delivered.append)


def submit(scheduler: Scheduler, *generations: Generation) -> None:
    for one in generations:
        scheduler.submit(one)


def drain(scheduler: Scheduler, *generations: Generation) -> None:
    for _ in range(1000):
        if all(one.ended for one in generations):
            return
        scheduler.turn()
    raise AssertionError("they did not end")


def between_steps(scheduler: Scheduler, action: Callable[[], Any]) -> None:
    result = scheduler.call(action)
    scheduler.turn()
    result.result(0)


def expected_output(one: Generation) -> list[int]:
    """What an undisturbed request would have sampled, its spans telling the weights."""
    tokens = list(one.prompt_ids)
    for version, start, end in one.spans:
        for _ in range(start, end):
            tokens.append(next_token(tokens, int(version)))
    return tokens[len(one.prompt_ids) :]


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
            one = generation(prompt, b, rid=f"job-{len(everything)}")
            everything.append(one)
            submit(scheduler, one)
            scheduler.turn()
        elif kind == "turn":
            for _ in range(a if scheduler.num_running or scheduler.num_waiting else 0):
                if scheduler.num_running or scheduler.num_waiting:
                    scheduler.turn()
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
    scheduler.turn()
    scheduler.turn()
    assert scheduler.abort("job-1") == 3  # one of them still waits for a row
    assert [one.rid for one in requests if one.ended] == ["job-1", "job-12", "job-1x"]
    assert requests[0].finish_reason == {"type": "abort", "message": "aborted"}
    assert len(requests[0].output_ids) == 1
    drain(scheduler, *requests)
    assert {len(one.output_ids) for one in requests if not one.rid.startswith("job-1")} == {50}


def test_pause_abort_ends_all_with_what_they_have(scheduler: Scheduler) -> None:
    requests = [generation([1, 2], 50) for _ in range(6)]
    submit(scheduler, *requests)
    for _ in range(4):
        scheduler.turn()
    scheduler.pause("abort")
    assert all(one.ended for one in requests)
    assert [len(one.output_ids) for one in requests] == [3] * 4 + [0] * 2
    assert [one.spans for one in requests] == [[("0", 0, 3)]] * 4 + [[]] * 2


def test_new_requests_wait_until_resumed(scheduler: Scheduler) -> None:
    scheduler.pause("retract")
    one = generation([1, 2], 2)
    submit(scheduler, one)
    scheduler.turn()
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
        scheduler.turn()
    scheduler.pause("retract")
    assert [one.rid for one in scheduler._waiting] == ["early-0", "early-1", "early-2", "early-3", "late"]
    scheduler.resume()
    scheduler.turn()
    assert decoder.prefills == [[4] * 4, [6] * 4]


def test_prefill_batches_are_bounded_and_of_like_length(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PASS_TOKENS", 210)
    monkeypatch.setattr(rows, "CHUNK_TOKENS", 60)
    scheduler = Scheduler(decoder, max_slots=10, version="0", deliver=lambda _: None)
    lengths = [101, 11, 91, 12, 10, 99, 13, 14, 15, 16]
    requests = [generation([1] * length, 9) for length in lengths]
    submit(scheduler, *requests)
    drain(scheduler, *requests)
    # Like goes with like; once some decode, a pass has 60 tokens, and what is longer takes several.
    assert decoder.prefills == [[100, 90], [10, 11, 9, 12], [60], [38], [13, 14, 15]]
    assert [one.output_ids for one in requests] == [expected_output(one) for one in requests]


def test_a_long_prompt_never_stands_between_two_tokens_with_more_than_a_chunk(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in passes of the model, not in time."""
    monkeypatch.setattr(rows, "CHUNK_TOKENS", 32)
    scheduler = Scheduler(decoder, max_slots=6, version="0", deliver=lambda _: None)
    talking = generation([1, 2, 3], 60)
    submit(scheduler, talking)
    scheduler.turn()
    scheduler.turn()
    others = [generation([9] * 500, 5), *(generation([i] * 30, 5) for i in range(3))]
    submit(scheduler, *others)
    gaps, computed = [], 0
    while not talking.ended:
        before, sampled = len(decoder.prefills), len(talking.output_ids)
        scheduler.turn()
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
    monkeypatch.setattr(rows, "CHUNK_TOKENS", 16)
    scheduler = Scheduler(decoder, max_slots=3, version="0", prefix_bytes=10_000, deliver=lambda _: None)
    talking = [generation([1, 2], 12), generation([3, 4], 30)]
    submit(scheduler, *talking)
    scheduler.turn()
    long = generation([*range(100)], 5, rid="long")
    submit(scheduler, long)
    while sum(map(sum, decoder.prefills)) < 40:
        scheduler.turn()
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


def test_a_chunk_that_cannot_be_computed_fails_its_request_alone(
    decoder: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_TOKENS", 16)
    decoder.refuses = 66
    scheduler = Scheduler(decoder, max_slots=3, version="0", deliver=lambda _: None)
    talking = generation([1, 2], 30)
    bad, late = generation([*range(100)], 5), generation([5] * 20, 5)
    submit(scheduler, talking)
    scheduler.turn()
    submit(scheduler, bad, late)
    drain(scheduler, talking, bad, late)
    assert bad.error is not None
    assert late.output_ids == expected_output(late)
    assert talking.output_ids == expected_output(talking)


def test_the_first_in_the_queue_is_never_passed_over(decoder: Remembering) -> None:
    scheduler = Scheduler(decoder, max_slots=8, version="0", deliver=lambda _: None)
    long = generation([1] * 300, 5)
    submit(scheduler, generation([2, 2], 40), long)
    for i in range(12):
        submit(scheduler, generation([i, 3], 40))
        scheduler.turn()
    assert long.ended


def test_a_prompt_of_one_token_needs_no_prefill(scheduler: Scheduler, decoder: Remembering) -> None:
    one = generation([7], 3)
    submit(scheduler, one)
    drain(scheduler, one)
    assert decoder.prefills == []
    assert one.output_ids == expected_output(one)


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


def test_a_model_that_fails_on_everything_ends_the_scheduler(decoder: Remembering) -> None:
    decoder.refuses = 1
    deaths: list[str] = []
    scheduler = Scheduler(
        decoder,
        max_slots=8,
        version="0",
        deliver=lambda _: None,
        on_death=lambda: deaths.append("died"),
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
        on_death=lambda: deaths.append(all(one.error for one in requests)),
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


def test_a_rid_in_use_is_refused_and_the_first_goes_on(scheduler: Scheduler) -> None:
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
    scheduler.turn()
    assert scheduler.flush() is False
    scheduler.pause("retract")
    assert scheduler.flush() is True
    assert decoder.rows == {}


def test_relabelling_keeps_what_was_sampled(scheduler: Scheduler) -> None:
    one = generation([1, 2], 4)
    submit(scheduler, one)
    for _ in range(3):
        scheduler.turn()
    scheduler.relabel("8")
    drain(scheduler, one)
    assert one.spans == [("0", 0, 2), ("8", 2, 4)]
