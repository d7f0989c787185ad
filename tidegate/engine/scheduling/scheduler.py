"""Continuous batching: one thread in which requests join and leave the batch between decode steps.

Every change (a new request, an abort, a pause, new weights) is taken from one inbox and applied between two
steps, so that no step runs with a partial change.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.inbox import Inbox, SchedulerCall
from tidegate.engine.scheduling.running_batch import Decoder, RunningBatch
from tidegate.errors import EngineError

log = logging.getLogger("tidegate.engine")

FAILURES_IN_A_ROW = 3
"""Consecutive failures of single requests after which the model is considered broken."""

MIN_IDLE_SHARE = 0.25
"""Share of a full step that rows are idle before a prefill pass starts. Until then the pass waits for more
requests, because a pass costs more than idle rows; at least one step runs between two passes."""

NOT_FINITE = "the model's logits are not finite for this request"
PAUSE_MODES: tuple[str, ...] = ("abort", "retract", "in_place")
T = TypeVar("T")


class Scheduler:
    """Owns the rows, the queue and the version label.

    `submit` and `call` may be used from any thread. The methods under "between steps" run in the scheduler's
    thread and are reached through `call`. `deliver` is called in that thread, at most once a step, with the
    requests that streamed a token or ended. `on_failure` is called once if the thread fails, after every
    request has received its error.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_slots: int,
        version: str,
        prefix_bytes: int = 0,
        deliver: Callable[[list[Generation]], None],
        matched_stop: Callable[[Generation], str | None] = lambda generation: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.version = version
        self.paused: str | None = None
        self._deliver = deliver
        self._matched_stop = matched_stop
        self._on_failure = on_failure
        self._rows = RunningBatch(model, max_slots, prefix_bytes)
        self.counters = self._rows.counters
        self._live: dict[str, Generation] = {}
        """Requests that have not ended, by id and in the order of arrival."""
        self._waiting: deque[Generation] = deque()
        """Those without a row, in the order in which they get one."""
        self._inbox = Inbox()
        self._notices: list[Generation] = []
        self._failures = 0
        self._idle_rows = 0
        self._broken: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # -- from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Stops after the current step; requests in flight get an error."""
        if self._thread.is_alive():
            with contextlib.suppress(EngineError):  # the thread has just failed
                self._inbox.call(self._stop)
            self._thread.join(timeout)

    def submit(self, generation: Generation) -> None:
        self._inbox.submit(generation)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Runs a function between two steps. Raises EngineError if the scheduler has failed."""
        return self._inbox.call(action)

    @property
    def failure(self) -> BaseException | None:
        return self._inbox.failure

    def totals(self) -> dict[str, int]:
        return asdict(self.counters)

    @property
    def num_running(self) -> int:
        return self._rows.count

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # -- between steps

    def abort(self, prefix: str = "") -> int:
        """Ends the requests whose id starts with `prefix`; returns their number."""
        return self._abort([live for rid, live in self._live.items() if rid.startswith(prefix)])

    def abort_one(self, generation: Generation) -> None:
        # By identity: a client may have reused the id for a new request after this one ended.
        if self._live.get(generation.rid) is generation:
            self._abort([generation])

    def _abort(self, generations: list[Generation]) -> int:
        aborted = set(map(id, generations))
        for row, owner in enumerate(self._rows.owners):
            if id(owner) in aborted:
                self._rows.collect_experts(row)
        for generation in generations:
            self._end(generation, {"type": "abort", "message": "aborted"})
            self._rows.cancel_prefill(generation)
        self._dequeue(generations)
        # From the end, as the last row moves into a freed one: it has been checked already.
        for row in range(self._rows.count - 1, -1, -1):
            if id(self._rows.owners[row]) in aborted:
                self._rows.remove(row)
        return len(generations)

    def pause(self, mode: str) -> None:
        """Stops sampling until `resume`.

        `abort` ends every request with its tokens so far. `retract` drops the cache and requeues requests,
        whose keys and values are computed again. `in_place` freezes them with their cache.
        """
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            self.retract()
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def retract(self) -> None:
        """Takes every request out of its row and requeues it at the front, in the order of arrival."""
        for row in range(self._rows.count):
            self._rows.collect_experts(row)
        owners = self._rows.clear()
        if not owners:
            return
        self.counters.retractions += len(owners)
        returned = set(map(id, owners))
        # Before those that wait, and in the order of arrival: rows are not in that order, as freed rows
        # are refilled from the end.
        self._waiting.extendleft(live for live in reversed(self._live.values()) if id(live) in returned)

    def flush(self) -> bool:
        """Frees the cache; does nothing and returns False while requests have rows."""
        if self._rows.count:
            return False
        self._rows.drop_cache()
        return True

    def load(self, weights: Any, version: str | None, *, keep_cache: bool, abort_all: bool) -> int:
        """Makes checked weights live; returns the number of requests in flight, which continue.

        Their keys and values are dropped and computed again, unless they were paused in place and
        `keep_cache` is set: then `kv_version` records the version of their oldest keys and values.
        """
        if abort_all:
            self.abort()
        in_flight = len(self._live)
        # Also with `keep_cache`: that keeps the values of running requests, whose turns record their
        # version, while a prefix would carry old values into new requests.
        self._rows.invalidate_prefixes()
        if self.paused != "in_place" or not keep_cache:
            self.retract()
            self._rows.drop_cache()
        try:
            self._rows.model.copy_weights(weights)
        except BaseException as error:
            self._broken = error
            why = f"the weights are partly loaded, and the engine ends: {error!r}"
            raise EngineError(why, retryable=True) from error
        for generation in self._rows.owners:
            # Only the first load sets it: the oldest values keep their version through later loads.
            generation.kv_version = generation.kv_version or self.version
        if version is not None:
            self.relabel(version)
        # The new version may have other adapters, and a request of a missing one cannot continue.
        serves = self._rows.model.serves
        self._abort([live for live in self._live.values() if not serves(live.adapter)])
        return in_flight

    def relabel(self, version: str) -> None:
        """Sets the version label of the live weights; tokens sampled so far keep their label."""
        self._rows.invalidate_prefixes()  # prefixes are only reused under their own version
        for generation in self._live.values():
            generation.close_span(self.version)
        self.version = version

    def _stop(self) -> None:
        self._stopping = True

    # -- the thread

    def run_once(self) -> None:
        """Empties the inbox, prefills or decodes once and delivers; blocks while there is nothing to do."""
        self._drain_inbox()
        if self._broken is not None:  # neither version's weights: no label is right
            raise self._broken
        # Again after the inbox: a pause or a stop in it has been acknowledged, so no token may follow.
        if self.paused is None and not self._stopping:
            self._advance()
        self._deliver_notices()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.run_once()
            self._fail_all(EngineError("the engine was stopped", retryable=True))
        except BaseException as error:  # recorded in `failure`, which ends the process
            log.critical("the scheduler failed", exc_info=True)
            self._fail_all(error)
            # After the errors: it ends the process, and clients would see a lost connection in place of
            # the cause.
            self._on_failure()

    def _drain_inbox(self) -> None:
        # Waits only while nothing is to be sampled: requests that have rows would stall until the next
        # arrival.
        idle = self.paused is not None or not (self.num_waiting or self._rows.count)
        for item in self._inbox.take(wait=idle):
            if isinstance(item, SchedulerCall):
                item.run()
            else:
                self._accept(item)

    def _accept(self, generation: Generation) -> None:
        # Aborts and streams find a request by its id, so two with one id could not be told apart.
        if generation.rid in self._live:
            self._notices.append(generation)
            generation.refused = True
            generation.error = f"rid {generation.rid!r} is in use"
            return
        # Checked in this thread: a load that was queued before the request may have changed the adapters.
        if not self._rows.model.serves(generation.adapter):
            self._notices.append(generation)
            generation.refused = True
            generation.error = (
                f"lora_path = {generation.adapter!r}: version {self.version} has no such adapter"
            )
            return
        self.counters.requests += 1
        self._live[generation.rid] = generation
        self._waiting.append(generation)

    def _dequeue(self, generations: Iterable[Generation]) -> None:
        """Removes requests that have a row or have ended from those that wait."""
        removed = set(map(id, generations))
        self._waiting = deque(waiting for waiting in self._waiting if id(waiting) not in removed)

    def _advance(self) -> None:
        rows = self._rows
        if (
            self.num_waiting
            and rows.slots.free
            and (rows.count == 0 or self._idle_rows >= MIN_IDLE_SHARE * rows.count)
        ):
            self._admit()
        elif rows.count:
            self._step()

    def _admit(self) -> None:
        """Prefills some of the requests that have waited longest, or a part of one."""
        self._idle_rows = 0
        # There is a free row for each of these; `choose` selects among them by cost.
        batch = self._rows.choose(itertools.islice(self._waiting, self._rows.slots.free))
        try:
            self._prefilled(self._rows.fill(batch))
        except Exception as error:  # noqa: BLE001 - raised again for the single request below
            log.warning(
                "a prefill of %d requests failed (%r): trying the requests one by one", len(batch), error
            )
            self._prefill_singly(batch)

    def _prefilled(self, generations: list[Generation]) -> None:
        """Takes requests out of the queue; those for their prompt's logprobs alone end."""
        self._failures = 0  # the model works
        self._dequeue(generations)
        for generation in generations:
            if generation.limit == 0:
                finite = all(map(math.isfinite, generation.prompt_logprobs))
                self._end(generation, {"type": "length", "length": 0}, None if finite else NOT_FINITE)

    def _prefill_singly(self, batch: list[Generation]) -> None:
        """Prefills requests singly and fails those that raise; raises after FAILURES_IN_A_ROW of them."""
        for generation in batch:
            try:
                self._prefilled(self._rows.fill([generation]))
            except Exception as error:
                self._failures += 1
                log.exception("request %s failed in the model", generation.rid)
                self._end(generation, None, f"the model failed on this request: {error!r}")
                # Otherwise `choose` returns the failed request again, and the queue never advances.
                self._rows.cancel_prefill(generation)
                self._dequeue([generation])
                # Each request seems at fault alone, but several in a row mean that the model or the
                # device is.
                if self._failures == FAILURES_IN_A_ROW:
                    raise

    def _step(self) -> None:
        self._idle_rows += min(self.num_waiting, self._rows.slots.free)
        ids, logprobs = (sampled.tolist() for sampled in self._rows.sample())
        for row in reversed(range(self._rows.count)):  # reversed, because the last row moves into a freed one
            generation = self._rows.owners[row]
            self._take_token(row, generation, ids[row], logprobs[row])
            if generation.ended:
                self._rows.remove(row)
            elif generation.stream:
                self._notices.append(generation)
        self.counters.tokens_sampled += len(ids)
        self.counters.steps += 1

    def _take_token(self, row: int, generation: Generation, token: int, logprob: float) -> None:
        # Such a token would be trained on with an undefined ratio, and its values would spoil its
        # sequence.
        if not math.isfinite(logprob):
            self._rows.discard_values(row)
            self._end(generation, None, NOT_FINITE)
            return
        generation.output_ids.append(token)
        generation.logprobs.append(logprob)
        if generation.top_logprobs:
            generation.output_top.append(self._rows.slots.top[row][: generation.top_logprobs])
        if generation.sampling_mask:
            logprob_among_kept, kept = self._rows.slots.kept[row]
            generation.kept_logprobs.append(logprob_among_kept)
            generation.kept.append(kept)
        if generation.grammar is not None:
            slots = self._rows.slots
            fault = generation.grammar.accept(token, int(slots.choices[row]), float(slots.masses[row]))
            if fault is not None:
                self._end(generation, None, f"the reply cannot follow its grammar: {fault}")
                return
        reason = self._finish_reason(generation)
        if reason is not None:
            # While the row still belongs to the request: `_step` frees it as soon as the request has
            # ended.
            self._rows.collect_experts(row)
            self._end(generation, reason)
            self._rows.cache_prefix(row)

    def _finish_reason(self, generation: Generation) -> dict[str, Any] | None:
        """Returns SGLang's finish reason if the newest token is the last, else None."""
        token = generation.output_ids[-1]
        if token in generation.params.stop_ids or (generation.grammar and generation.grammar.done):
            return {"type": "stop", "matched": token}
        if generation.params.stop and (text := self._matched_stop(generation)) is not None:
            return {"type": "stop", "matched": text}
        if len(generation.output_ids) >= generation.limit:
            return {"type": "length", "length": len(generation.output_ids)}
        return None

    def _end(self, generation: Generation, reason: dict[str, Any] | None, error: str | None = None) -> None:
        generation.close_span(self.version)
        generation.error = error
        generation.finish_reason = reason
        self._live.pop(generation.rid, None)
        self._notices.append(generation)

    def _deliver_notices(self) -> None:
        if self._notices:
            notices, self._notices = self._notices, []
            self._deliver(notices)

    # -- the end

    def _fail_all(self, error: BaseException) -> None:
        # First, so that a request that arrives during the clean-up is refused and not left without an
        # answer.
        self._inbox.close(error)
        why = f"the engine ended: {error}"
        for generation in list(self._live.values()):
            self._end(generation, None, why)
        self._rows.clear()
        self._waiting.clear()
        # Items that were queued before the close have no other consumer, and their callers would wait for
        # ever.
        for item in self._inbox.take(wait=False):
            if isinstance(item, SchedulerCall):
                item.fail(EngineError(why, retryable=True))
            else:
                item.error = why
                self._notices.append(item)
        self._deliver_notices()
