"""The pool of engines: sampling that no engine's end interrupts, and that an agent never notices.

A connection that fails, a 5xx or an aborted request is tried again while the session's deadline allows:
nothing of it was delivered, so sending it again is safe, and what a stream has delivered is continued.
An engine that fails is in quarantine until it answers again; one that hangs is found by the same probe,
and the calls that wait on it move on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from tidegate.errors import EngineError
from tidegate.gateway.engines.client import EngineClient
from tidegate.gateway.engines.dispatcher import Dispatcher
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint, EngineRecord
from tidegate.gateway.engines.health import HealthProbe, most_calls
from tidegate.gateway.engines.protocol import (
    WHOLE_CALL_PARAMS,
    GenerateRequest,
    GenerateResult,
    RequestRefusedError,
    request_body,
)
from tidegate.gateway.ids import unique_name

log = logging.getLogger("tidegate.gateway.engines.engine")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
LAST_EVENT_S = 10.0
"""Time limit for an engine to end an aborted request with the event that attests its versions."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Durations in seconds."""

    connect_s: float = 5.0
    probe_every_s: float = 2.0
    probe_timeout_s: float = 10.0
    """An engine whose `/model_info` is silent for so long hangs."""
    engine_calls: int | None = None
    """Calls at once on one engine; None: twice the slots that it tells, or 256 where it tells none."""
    waiting_calls: int = 8192
    """How many calls may wait for a slot; what comes beyond is refused."""
    shards: int = 1
    """How many gateways share the engines."""


class EnginePool:
    """Sends orders to engines; owns their connections and one probe task an engine."""

    def __init__(
        self, options: PoolOptions | None = None, on_death: Callable[[str], None] = log.error
    ) -> None:
        self._options = options or PoolOptions()
        self._on_death = on_death
        self._dispatch = Dispatcher(self._options.waiting_calls)
        self.led = False
        """A trainer says which engines serve: what others add waits until it is admitted."""
        self._watches: dict[EngineEndpoint, HealthProbe] = {}
        self._probes: dict[EngineEndpoint, asyncio.Task[None]] = {}
        self.errors = 0
        self.continued = 0
        """Replies that went on in a further engine call, with the tokens so far."""

    async def start(self) -> None:
        self._wire = EngineClient(self._options.connect_s, self._options.probe_timeout_s)

    async def close(self) -> None:
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await self._wire.close()

    # -- membership ------------------------------------------------------------------------------

    async def add(self, placed: EngineRecord, wait_s: float = 0.0) -> EngineEndpoint:
        """Take an engine in, or change what was known of it; waits up to `wait_s` for its first probe to
        end. Idempotent.

        `control` are the engines behind a router: control calls go to them.
        """
        url = placed.url.rstrip("/")
        engine = self._dispatch.engines.get(url)
        if engine is None:
            engine = EngineEndpoint(url, (url,))
            self._dispatch.add(engine)
            self._observe(engine)
        engine.control = tuple(one.rstrip("/") for one in placed.control) or (url,)
        engine.joined, engine.admitted = placed.joined, placed.admitted
        self._changed(engine)
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._watches[engine].probed.wait()
        return engine

    def _observe(self, engine: EngineEndpoint) -> None:
        options = self._options
        calls = functools.partial(most_calls, fixed=options.engine_calls, shards=options.shards)
        watch = HealthProbe(engine, self._wire, options.probe_every_s, calls, self._changed, lambda: self.led)
        probe = asyncio.create_task(watch.run(), name=f"probe {engine.url}")
        probe.add_done_callback(self._probe_ended)
        self._watches[engine], self._probes[engine] = watch, probe

    async def remove(self, url: str) -> bool:
        """Give it no new calls; those under way go on. Whether it was there."""
        engine = self._dispatch.remove(url.rstrip("/"))
        if engine is None:
            return False
        self._watches.pop(engine)
        self._probes.pop(engine).cancel()
        return True

    def get(self, url: str) -> EngineEndpoint | None:
        return self._dispatch.engines.get(url.rstrip("/"))

    def engines(self) -> list[EngineEndpoint]:
        return list(self._dispatch.engines.values())

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return self._dispatch.waiting

    @property
    def max_context(self) -> int | None:
        """The smallest context among the engines that told theirs."""
        known = [engine.max_context for engine in self.engines() if engine.max_context]
        return min(known, default=None)

    def _changed(self, engine: EngineEndpoint) -> None:
        if engine.url not in self._dispatch.engines:
            return
        if engine.serves:
            self._dispatch.serve(engine)
        else:
            self._dispatch.down(engine)

    def _failed(self, engine: EngineEndpoint, *, at_once: bool = False, counts: bool = True) -> None:
        self.errors += 1
        if engine in self._watches:  # else it was removed meanwhile
            self._watches[engine].failed(at_once=at_once, counts=counts)

    def _probe_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._on_death(f"{task.get_name()} ended: {task.exception()!r}")

    # -- sampling --------------------------------------------------------------------------------

    async def sample(
        self,
        order: GenerateRequest,
        seat: Affinity,
        deadline: float,
        on_ids: Callable[[list[int]], None] | None = None,
    ) -> GenerateResult:
        """Sample one reply, whatever happens to engines meanwhile; `deadline` is in the loop's time.

        `on_ids` is called with all ids so far as a stream brings them. Cancelling aborts upstream.
        Raises QueueFullError where too many wait already, RequestRefusedError where an engine refuses the
        request, and EngineError, never retryable: the deadline passed, an engine answered nonsense, or a
        reply broke off that was delivered in part and cannot go on. An order that is closed gives what
        was sampled until then.
        """
        sampled = GenerateResult()
        wait, last, fresh = _FIRST_WAIT_S, "there is no engine", True
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                order.on_close = lambda: self._close(order, timeout)
                while True:
                    engine = await self._dispatch.enter(seat, fresh=fresh)
                    fresh = False
                    before = len(sampled.ids)
                    try:
                        await self._call(engine, order, sampled, on_ids)
                    except EngineError as error:
                        if not error.retryable:
                            raise
                        last = str(error)
                        seat.disturbances += 1
                        log.info("%s; trying again", error)
                    finally:
                        self._dispatch.leave(engine)
                    if order.closed or order.settle(sampled):
                        return sampled
                    if sampled.ids and not order.resumable:
                        if order.stream:
                            raise EngineError(
                                f"a reply broke off after {len(sampled.ids)} tokens, and one with "
                                f"{', '.join(sorted(order.params.keys() & WHOLE_CALL_PARAMS))} cannot go on"
                            )
                        sampled, before = GenerateResult(), 0
                    self.continued += bool(sampled.ids)
                    wait = _FIRST_WAIT_S if len(sampled.ids) > before else min(wait * 2, _LONGEST_WAIT_S)
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))
        except TimeoutError:
            if order.closed and len(sampled.logprobs) == len(sampled.ids):
                return sampled
            raise EngineError(f"no engine answered before the session's deadline; last: {last}") from None
        finally:
            order.on_close = lambda: None  # a timeout that has ended cannot be rescheduled

    def _close(self, order: GenerateRequest, timeout: asyncio.Timeout) -> None:
        """Abort the call that samples the order, and give it time for its last event."""
        wait_s = 0.0
        if order.abort is not None:
            order.abort()
            wait_s = LAST_EVENT_S
        if timeout.expired():
            return
        timeout.reschedule(min(timeout.when() or math.inf, asyncio.get_running_loop().time() + wait_s))

    async def _call(
        self,
        engine: EngineEndpoint,
        order: GenerateRequest,
        sampled: GenerateResult,
        on_ids: Callable[[list[int]], None] | None,
    ) -> None:
        """One `/generate`; adds to `sampled` what it gave, also where a stream broke off."""
        # Engines match ids by prefix when they abort, so no id may begin another one: fixed length.
        rid = unique_name()
        begun = list(sampled.ids)
        piece, stopped = GenerateResult(), False

        def take(newer: GenerateResult) -> None:
            nonlocal piece, stopped
            piece = newer
            if on_ids is not None:
                on_ids(begun + newer.ids)
            if begun and not stopped and order.stop_after(begun + newer.ids) is not None:
                # The engine saw only the end of the stop string. Its last event attests the versions.
                stopped = True
                self._wire.abort(engine.control, rid)

        try:
            async with asyncio.timeout(None) as timeout:
                engine.calls[rid] = timeout
                order.abort = lambda: self._wire.abort(engine.control, rid)
                stream = order.streams(sampled)
                await self._wire.generate(engine.url, request_body(order, sampled, rid), stream, take)
            engine.failures = 0
        except (aiohttp.ClientError, OSError) as error:
            self._failed(engine, at_once=True)
            if isinstance(error, TimeoutError):  # the probe gave the engine up
                self._wire.abort(engine.control, rid)
            if len(piece.logprobs) != len(piece.ids):
                raise EngineError(
                    f"{engine.url}: its stream broke off after tokens without logprobs"
                ) from error
            raise EngineError(
                f"{engine.url}: {str(error) or type(error).__name__}", retryable=True
            ) from error
        except RequestRefusedError:
            engine.failures = 0
            raise
        except EngineError as error:
            self._failed(engine, counts=error.retryable)
            raise
        except asyncio.CancelledError:
            self._wire.abort(engine.control, rid)
            raise
        finally:
            engine.calls.pop(rid, None)
            order.abort = None
            # A stream that broke off: what it delivered stays, and is continued.
            sampled.extend(piece)
