"""Continuous batching: one thread in which requests join, decode together, and leave between steps.

Everything that changes what the engine does (a new request, an abort, a pause, new weights) comes
through one inbox and is done between two steps, so no step sees half of a change.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.inbox import Inbox, SchedulerCall
from tidegate.engine.scheduling.queue import InFlight
from tidegate.engine.scheduling.running_batch import Decoder, RunningBatch
from tidegate.errors import EngineError

log = logging.getLogger("tidegate.engine")

FAILURES_IN_A_ROW = 3
"""So many requests that fail alone, with none that succeeds between, are no longer their own fault."""

PATIENCE = 4
"""A prefill pass waits for others to join it until rows stood idle for 1/PATIENCE of a full step: passes
cost more each than idle rows do, and at least one step lies between two of them."""

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    tokens_sampled: int = 0
    requests: int = 0
    steps: int = 0
    retractions: int = 0


class Scheduler:
    """Owns the rows, the queue and the version label.

    `submit` and `call` may be used from any thread; the methods under "between steps" run in the
    scheduler's own thread and are reached through `call`. `deliver` is called in that thread, at most
    once a step, with the requests that streamed a token or ended. `on_death` is called once if the
    thread dies; by then every request has its error.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_slots: int,
        version: str,
        prefix_bytes: int = 0,
        deliver: Callable[[list[Generation]], None],
        finds_stop: Callable[[Generation], str | None] = lambda generation: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.version = version
        self.paused: PauseMode | None = None
        self.counters = Counters()
        self._deliver = deliver
        self._finds_stop = finds_stop
        self._on_death = on_death
        self._rows = RunningBatch(model, max_slots, prefix_bytes)
        self._in_flight = InFlight()
        self._inbox = Inbox()
        self._notices: list[Generation] = []
        self._failures = 0
        self._idle = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # -- from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End after the current step; requests in flight get an error."""
        if self._thread.is_alive():
            with contextlib.suppress(EngineError):  # it has just died
                self._inbox.call(self._stop)
            self._thread.join(timeout)

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises EngineError if the scheduler died."""
        self._inbox.submit(generation)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run something between two steps. Raises EngineError if the scheduler died."""
        return self._inbox.call(action)

    @property
    def death(self) -> BaseException | None:
        """What the thread died of."""
        return self._inbox.death

    def totals(self) -> dict[str, int]:
        rows = self._rows
        reuse = {"tokens_prefilled": rows.tokens_prefilled, "tokens_reused": rows.tokens_reused}
        return asdict(self.counters) | reuse

    @property
    def num_running(self) -> int:
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        return len(self._in_flight.waiting)

    # -- between steps

    def abort(self, prefix: str, *, everything: bool = False) -> int:
        """End the requests whose id starts with `prefix`; returns how many."""
        return self._abort(list(self._in_flight) if everything else self._in_flight.matching(prefix))

    def abort_one(self, generation: Generation) -> None:
        """End this request, if it has not ended."""
        if generation in self._in_flight:
            self._abort([generation])

    def _abort(self, hit: list[Generation]) -> int:
        for generation in hit:
            self._end(generation, {"type": "abort", "message": "aborted"})
            self._rows.abandon(generation)
        self._in_flight.seat(hit)
        gone = set(map(id, hit))
        for row in range(self._rows.count - 1, -1, -1):
            if id(self._rows.owners[row]) in gone:
                self._rows.leave(row)
        return len(hit)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`.

        `abort` ends every request with what it has; `retract` drops the cache and requeues them, to be
        computed again from their tokens; `in_place` freezes them with their cache.
        """
        if mode == "abort":
            self.abort("", everything=True)
        elif mode == "retract":
            self.retract()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def retract(self) -> None:
        """Take every request out of its row; they come back first, in the order of their arrival."""
        owners = self._rows.clear()
        if not owners:
            return
        self.counters.retractions += len(owners)
        self._in_flight.unseat(owners)

    def flush(self) -> bool:
        """Free the cache; False (and nothing done) while requests hold rows."""
        if self._rows.count:
            return False
        self._rows.forget()
        return True

    def load(self, weights: Any, version: str | None, *, keep_cache: bool, abort_all: bool) -> int:
        """Make checked weights live, with the requests kept; returns how many were in flight.

        Their keys and values are dropped and computed again, unless they were paused in place and
        `keep_cache` is asked for: then they say from now on how old their cache is.
        """
        if abort_all:
            self.abort("", everything=True)
        in_flight = len(self._in_flight)
        self._rows.outdate()
        if self.paused != "in_place" or not keep_cache:
            self.retract()
            self._rows.forget()
        self._rows.model.copy_weights(weights)
        for generation in self._rows.owners:
            generation.kv_version = generation.kv_version or self.version
        if version is not None:
            self.relabel(version)
        return in_flight

    def relabel(self, version: str) -> None:
        """Name the version of the live weights; what was sampled so far keeps its label."""
        self._rows.outdate()  # what is reused is of the version that it is reused under
        for generation in self._in_flight:
            generation.close_span(self.version)
        self.version = version

    def _stop(self) -> None:
        self._stopping = True

    # -- the thread

    def turn(self) -> None:
        """Take what came in, prefill or decode once, hand over; blocks while there is nothing to do."""
        self._take_inbox()
        if self.paused is None and not self._stopping:
            self._advance()
        self._hand_over()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
            self._fail_all(EngineError("the engine was stopped", retryable=True))
        except BaseException as error:  # recorded in `death`, which ends the process
            log.critical("the scheduler died", exc_info=True)
            self._fail_all(error)
            self._on_death()

    def _take_inbox(self) -> None:
        idle = self.paused is not None or not (self.num_waiting or self._rows.count)
        for item in self._inbox.take(wait=idle):
            if isinstance(item, SchedulerCall):
                item.run()
            else:
                self._accept(item)

    def _accept(self, generation: Generation) -> None:
        if self._in_flight.uses(generation.rid):
            self._notices.append(generation)
            generation.refused = True
            generation.error = f"rid {generation.rid!r} is in use"
            return
        self.counters.requests += 1
        self._in_flight.add(generation)

    def _advance(self) -> None:
        rows = self._rows
        if self.num_waiting and rows.free and (rows.count == 0 or self._idle * PATIENCE >= rows.count):
            self._admit()
        elif rows.count:
            self._step()

    def _admit(self) -> None:
        """Prefill some of the requests that have waited longest, or a part of one."""
        self._idle = 0
        # All of these have a row to come; which of them goes with the first is a matter of cost alone.
        batch = self._rows.choose(itertools.islice(self._in_flight.waiting, self._rows.free))
        try:
            self._in_flight.seat(self._rows.fill(batch))
        except Exception as error:  # noqa: BLE001 - raised again below, alone with its request
            log.warning("a prefill of %d requests failed (%r): trying them one by one", len(batch), error)
            self._prefill_each(batch)

    def _prefill_each(self, batch: list[Generation]) -> None:
        """Find the request that the model cannot compute; raises when it can compute none of several."""
        for generation in batch:
            try:
                self._in_flight.seat(self._rows.fill([generation]))
                self._failures = 0
            except Exception as error:
                self._failures += 1
                log.exception("request %s cannot be computed", generation.rid)
                self._end(generation, None, f"the model failed on this request: {error!r}")
                self._rows.abandon(generation)
                self._in_flight.seat([generation])
                if self._failures == FAILURES_IN_A_ROW:
                    raise

    def _step(self) -> None:
        """Sample one token for every row."""
        self._idle += min(self.num_waiting, self._rows.free)
        ids, logprobs = (sampled.tolist() for sampled in self._rows.sample())
        for row in reversed(range(self._rows.count)):  # the last row moves into one that is left
            generation = self._rows.owners[row]
            self._take_token(row, generation, ids[row], logprobs[row])
            if generation.ended:
                self._rows.leave(row)
            elif generation.stream:
                self._notices.append(generation)
        self.counters.tokens_sampled += len(ids)
        self.counters.steps += 1

    def _take_token(self, row: int, generation: Generation, token: int, logprob: float) -> None:
        """Give a request its newest token, and end it where that is its last."""
        if not math.isfinite(logprob):
            self._rows.poisoned(row)
            self._end(generation, None, "the model's logits are not finite for this request")
            return
        generation.output_ids.append(token)
        generation.logprobs.append(logprob)
        if generation.grammar is not None:
            slots = self._rows.slots
            fault = generation.grammar.accept(token, int(slots.choices[row]), float(slots.masses[row]))
            if fault is not None:
                self._end(generation, None, f"the reply cannot follow its grammar: {fault}")
                return
        reason = self._finish_reason(generation)
        if reason is not None:
            self._end(generation, reason)
            self._rows.remember(row)

    def _finish_reason(self, generation: Generation) -> dict[str, Any] | None:
        """Why the newest token is the last, as SGLang says it; None where others follow."""
        token = generation.output_ids[-1]
        if token in generation.params.stop_ids or (generation.grammar and generation.grammar.done):
            return {"type": "stop", "matched": token}
        if generation.params.stop and (text := self._finds_stop(generation)) is not None:
            return {"type": "stop", "matched": text}
        if len(generation.output_ids) >= generation.limit:
            return {"type": "length", "length": len(generation.output_ids)}
        return None

    def _end(self, generation: Generation, reason: dict[str, Any] | None, error: str | None = None) -> None:
        generation.close_span(self.version)
        generation.error = error
        generation.finish_reason = reason
        self._in_flight.end(generation)
        self._notices.append(generation)

    def _hand_over(self) -> None:
        if self._notices:
            notices, self._notices = self._notices, []
            self._deliver(notices)

    # -- the end

    def _fail_all(self, error: BaseException) -> None:
        self._inbox.close(error)
        why = f"the engine ended: {error}"
        for generation in self._in_flight:
            self._end(generation, None, why)
        self._rows.clear()
        self._in_flight.waiting.clear()
        for item in self._inbox.take(wait=False):
            if isinstance(item, SchedulerCall):
                item.result.set_exception(EngineError(why, retryable=True))
            else:
                item.error = why
                self._notices.append(item)
        self._hand_over()
