"""The pool of engines: if one fails, its calls are retried on others, and agents do not see the failure.

A failed connection, a 5xx or an aborted request is retried until the session's deadline: tokens not delivered
are sampled again, and a stream continues from the tokens already delivered. A failed engine is quarantined
until it answers a probe; the same probe detects a hanging engine, whose calls then move to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
from collections.abc import Callable, Collection
from hashlib import blake2b

from tidegate.errors import EngineError
from tidegate.gateway.engines.client import EngineClient
from tidegate.gateway.engines.dispatcher import Dispatcher
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint, EngineRecord, PoolOptions
from tidegate.gateway.engines.health import HealthProbe
from tidegate.gateway.engines.protocol import (
    NON_RESUMABLE_PARAMS,
    GenerateRequest,
    GenerateResult,
    RequestRefusedError,
    SlowEnginesError,
    reply_reader,
    request_body,
)
from tidegate.gateway.ids import unique_name
from tidegate.service.backoff import backoff_s
from tidegate.turn import VersionSpan
from tidegate.weights.adapter_files import requested_adapter

log = logging.getLogger("tidegate.gateway.engines.engine")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""Errors of a connection whose cause is the gateway's own process or machine, not the engine."""
LAST_EVENT_S = 10.0
"""Time limit for an engine to end an aborted request with the event that reports its versions."""


def _constant(load: str | None) -> Callable[[], str | None]:
    """Returns a `GenerateRequest.load` that describes the moment of this call."""
    return lambda: load


class EnginePool:
    """Sends requests to engines; owns their connections and one probe task per engine."""

    def __init__(
        self, options: PoolOptions | None = None, on_failure: Callable[[str], None] = log.error
    ) -> None:
        self._options = options or PoolOptions()
        self._on_failure = on_failure
        self._client = EngineClient(self._options.connect_s, self._options.probe_timeout_s, self._options.key)
        self._dispatch = Dispatcher(self._options.waiting_calls)
        self.trainer_managed = False
        """A trainer manages the engines: one added by another client waits until the trainer admits it."""
        self._probes: dict[EngineEndpoint, HealthProbe] = {}
        self._candidate_share = 0.0
        self.errors = 0
        self.continued = 0
        """Engine calls that continued a reply from its tokens so far."""

    async def close(self) -> None:
        tasks = [probe.task for probe in self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    # -- membership ------------------------------------------------------------------------------

    async def add(self, record: EngineRecord, wait_s: float = 0.0) -> EngineEndpoint:
        """Adds an engine or updates its record; waits up to `wait_s` for the first probe. Idempotent."""
        url = record.url.rstrip("/")
        engine = self._dispatch.engines.get(url)
        # Before it gets calls: the trainer may have loaded other adapters.
        if engine is not None and record.admitted:
            await self._probes[engine].refresh()
        if engine is None:
            engine = EngineEndpoint(url, (url,), policy=record.policy)
            self._dispatch.add(engine)
            probe = HealthProbe(
                engine,
                self._client,
                self._options,
                self._changed,
                trainer_managed=lambda: self.trainer_managed,
                others_serve=lambda: any(one.serves for one in self.engines(record.policy)),
            )
            probe.task.add_done_callback(self._probe_ended)
            self._probes[engine] = probe
        engine.control = tuple(address.rstrip("/") for address in record.control) or (url,)
        engine.joined, engine.admitted = record.joined, record.admitted
        self._changed(engine)
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._probes[engine].probed.wait()
        return engine

    async def remove(self, url: str) -> bool:
        """Takes an engine out; its running calls continue. Returns whether it was in the pool."""
        engine = self._dispatch.remove(url.rstrip("/"))
        if engine is None:
            return False
        self._probes.pop(engine).task.cancel()
        return True

    def get(self, url: str) -> EngineEndpoint | None:
        return self._dispatch.engines.get(url.rstrip("/"))

    def engines(self, policy: str | None = None) -> list[EngineEndpoint]:
        """Returns the engines, or those of a policy."""
        engines = self._dispatch.engines.values()
        return [engine for engine in engines if policy is None or engine.policy == policy]

    def set_candidate(self, urls: Collection[str], share: float) -> None:
        """Sets which engines have a candidate version, and which share of the new conversations they serve.

        They serve no other session, and these sessions get tokens of no other engine, except while there is
        no such engine.
        """
        self._candidate_share = share
        self._dispatch.regroup({url.rstrip("/") for url in urls})

    def draws_candidate(self, key: str) -> bool:
        """Whether a new conversation samples from the candidate version: the set share of them, by a hash."""
        if not self._candidate_share or not any(engine.candidate for engine in self.engines()):
            return False
        drawn = int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) / 2**64
        return drawn < self._candidate_share

    @property
    def waiting(self) -> int:
        return self._dispatch.waiting

    def max_context(self, policy: str = "") -> int | None:
        """Smallest context length that an engine of a policy reports; None if none does."""
        engines = self.engines(policy)
        return min((engine.max_context for engine in engines if engine.max_context), default=None)

    def _changed(self, engine: EngineEndpoint) -> None:
        if engine.url not in self._dispatch.engines:
            return
        for rid, adapter in engine.adapters_in_use.items():
            if adapter != engine.adapter:  # the call goes on with the new one
                self._client.abort(engine.control, rid)
        if engine.serves:
            self._dispatch.dispatch_waiting(engine)
        else:
            self._dispatch.requeue(engine)

    def _failed(self, engine: EngineEndpoint, *, at_once: bool = False, counts: bool = True) -> None:
        self.errors += 1
        if engine in self._probes:  # not removed meanwhile
            self._probes[engine].failed(at_once=at_once, counts=counts)

    def _probe_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._on_failure(f"{task.get_name()} ended: {task.exception()!r}")

    # -- sampling --------------------------------------------------------------------------------

    async def sample(
        self,
        request: GenerateRequest,
        affinity: Affinity,
        deadline: float,
        on_ids: Callable[[list[int]], None] | None = None,
    ) -> GenerateResult:
        """Samples one reply, retrying on other engines after failures.

        `deadline` is in the loop's time. `on_ids` is called with all ids so far on each streamed event.
        Cancelling aborts the engine call. A request closed by its client returns the tokens so far.
        Raises QueueFullError, RequestRefusedError, SlowEnginesError if the deadline passes while engines
        serve, and a non-retryable EngineError if it passes while none does, a reply is invalid, or a partly
        delivered reply cannot be resumed.
        """
        result = GenerateResult()
        engine: EngineEndpoint | None = None
        failures, last, fresh = 0, "no engine in rotation", True
        load: str | None = None
        request.load = lambda: self._load(engine, affinity.policy)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                request.on_close = lambda: self._close(request, timeout)
                while True:
                    engine = None
                    engine = await self._dispatch.acquire(affinity, fresh=fresh)
                    fresh = False
                    length_before = len(result.ids)
                    try:
                        await self._call(engine, request, result, on_ids)
                    except EngineError as error:
                        if not error.retryable or not request.has_logprobs(result):
                            raise
                        last = str(error)
                        affinity.disruptions += 1
                        log.info("%s; retrying", error)
                    except asyncio.CancelledError:
                        load = request.load()
                        request.load = _constant(load)  # with this call, which is released below
                        raise
                    finally:
                        self._dispatch.release(engine)
                    if request.closed or request.complete(result):
                        if not request.has_experts(result):
                            raise EngineError(f"{engine.url} returned no experts of an aborted reply")
                        return result
                    if result.ids and not request.resumable:
                        if request.stream:
                            names = ", ".join(sorted(request.params.keys() & NON_RESUMABLE_PARAMS))
                            raise EngineError(
                                f"the reply was interrupted after {len(result.ids)} tokens, and a reply with "
                                f"{names} cannot be resumed"
                            )
                        result, length_before = GenerateResult(), 0
                    self.continued += bool(result.ids)
                    grew = len(result.ids) > length_before
                    failures = 0 if grew else failures + 1
                    await asyncio.sleep(backoff_s(failures, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        except TimeoutError:
            if request.closed and request.has_logprobs(result) and request.has_experts(result):
                return result
            load = load or request.load()
            if load is not None and not failures:
                raise SlowEnginesError(load) from None
            raise EngineError(
                f"no engine answered before the session's deadline; last error: {last}"
            ) from None
        finally:
            request.on_close = lambda: None  # an ended timeout cannot be rescheduled

    def _load(self, engine: EngineEndpoint | None, policy: str) -> str | None:
        """Describes the load of a policy's engines; None if the one that has the call, or every one, is lost.

        An engine is lost once it is out of rotation, or has left a probe unanswered and delivered no token.
        """
        silent_s = self._options.probe_every_s + self._options.probe_timeout_s
        since = asyncio.get_running_loop().time() - silent_s
        serving = [one for one in self.engines(policy) if one.serves and one.seen >= since]
        if not serving or (engine is not None and engine not in serving):
            return None
        rate, running = sum(one.rate for one in serving), sum(one.busy for one in serving)
        return f"engines sample {rate:.3g} tokens/s for {running} calls, and {self.waiting} more calls wait"

    def _close(self, request: GenerateRequest, timeout: asyncio.Timeout) -> None:
        """Abort the running engine call and wait up to LAST_EVENT_S for its last event."""
        wait_s = 0.0
        if request.abort is not None:
            request.abort()
            wait_s = LAST_EVENT_S
        if timeout.expired():
            return
        timeout.reschedule(min(timeout.when() or math.inf, asyncio.get_running_loop().time() + wait_s))

    async def _has_adapter(self, engine: EngineEndpoint, adapter: str | None) -> bool:
        """Whether an engine says now that it serves these adapters, and not those of another version."""
        probe = self._probes.get(engine)
        return probe is not None and await probe.refresh() and engine.adapter == adapter

    async def _call(
        self,
        engine: EngineEndpoint,
        request: GenerateRequest,
        result: GenerateResult,
        on_ids: Callable[[list[int]], None] | None,
    ) -> None:
        """Call `/generate` once and add its tokens to `result`, also those of an interrupted stream."""
        # Engines abort by id prefix, so no id may be a prefix of another: fixed length.
        rid = unique_name()
        previous_ids = list(result.ids)
        piece, stopped = GenerateResult(), False
        stop_after = request.unseen_stop_search(previous_ids)
        # Versions only grow, so all keys and values that calls with this number share are at least as new.
        oldest_kv = engine.version if self._options.keeps_kv else None
        adapter, version = engine.adapter, engine.version

        def take(newer: GenerateResult) -> None:
            nonlocal piece, stopped
            engine.seen = asyncio.get_running_loop().time()
            engine.received += len(newer.ids) - len(piece.ids)
            if self._options.keeps_kv:
                newer.note_kept_kv(oldest_kv)
            if adapter is not None and version is not None:  # the engine's label tells what it loaded last
                newer.spans = [VersionSpan(version, 0, len(newer.ids))] if newer.ids else []
            piece = newer
            if on_ids is not None:
                on_ids(previous_ids + newer.ids)
            ids = previous_ids + newer.ids
            if stop_after is not None and not stopped and stop_after(ids) is not None:
                # The engine did not see the whole stop string. Its last event reports the versions.
                stopped = True
                self._client.abort(engine.control, rid)

        try:
            async with asyncio.timeout(None) as timeout:
                engine.calls[rid] = timeout
                if adapter is not None and requested_adapter(adapter, request.adapter) is not None:
                    engine.adapters_in_use[rid] = adapter
                request.abort = lambda: self._client.abort(engine.control, rid)
                stream = request.should_stream(result)
                body = request_body(request, result, rid, oldest_kv, adapter)
                await self._client.generate(engine.url, body, stream, take, reply_reader(request, result))
            engine.failures = 0
        except OSError as error:
            own = error.errno in _OWN_LIMITS
            self._failed(engine, at_once=not own, counts=not own)
            if isinstance(error, TimeoutError):  # HealthProbe rescheduled it: the engine hangs
                self._client.abort(engine.control, rid)
            if not request.has_logprobs(piece):
                raise EngineError(
                    f"{engine.url}: the stream was interrupted after tokens without logprobs"
                ) from error
            raise EngineError(
                f"{engine.url}: {str(error) or type(error).__name__}", retryable=True
            ) from error
        except RequestRefusedError as refusal:
            engine.failures = 0
            if (adapter or request.adapter) and not await self._has_adapter(engine, adapter):
                raise EngineError(str(refusal), retryable=True) from refusal
            raise
        except EngineError as error:
            self._failed(engine, counts=error.retryable)
            raise
        except asyncio.CancelledError:
            self._client.abort(engine.control, rid)
            raise
        finally:
            engine.calls.pop(rid, None)
            engine.adapters_in_use.pop(rid, None)
            request.abort = None
            result.extend(piece)  # also the tokens of an interrupted stream, to continue from
