"""The pool of engines: who gets a request, who is in quarantine, and how an agent never notices.

A connection that fails, a 5xx or an aborted request is tried again while the session's deadline allows:
nothing of it was delivered, so sending it again is safe, and what a stream has delivered is continued.
An engine that fails is in quarantine until `/model_info` answers; one that hangs is found by the same
probe, and the calls that wait on it move on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from tidegate.errors import EngineError
from tidegate.gateway.protocol import Order, Sampled, read_reply, request_body

log = logging.getLogger("tidegate.gateway.engines")

RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
_FAILURES_TO_QUARANTINE = 3
_SILENCES_TO_QUARANTINE = 2
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0


@dataclass(eq=False, slots=True)
class Engine:
    """One engine as the pool sees it."""

    url: str
    healthy: bool = False
    """Whether it gets calls; not before it answered a probe, and not in quarantine."""
    quarantined: bool = False
    max_context: int | None = None
    weight_version: str | None = None
    failures: int = 0
    calls: dict[str, asyncio.Timeout] = field(default_factory=dict)
    """Calls under way, by request id; the timeout ends one that waits on an engine that hangs."""
    probe: asyncio.Task[None] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)

    def to_wire(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "healthy": self.healthy,
            "quarantined": self.quarantined,
            "calls": len(self.calls),
            "weight_version": self.weight_version,
            "max_context": self.max_context,
        }


@dataclass(slots=True)
class Seat:
    """Where a session sits: the engine that has its prefix in cache."""

    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """Seconds."""

    connect_s: float = 5.0
    probe_every_s: float = 2.0
    probe_timeout_s: float = 10.0
    """An engine whose `/model_info` is silent for so long hangs."""


class EnginePool:
    """Sends orders to engines; owns one pooled HTTP session and one probe task an engine."""

    def __init__(self, times: PoolTimes | None = None, on_death: Callable[[str], None] = log.error) -> None:
        self._times = times or PoolTimes()
        self._on_death = on_death
        self._engines: dict[str, Engine] = {}
        self._changed = asyncio.Condition()
        self._http: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self.errors = 0

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._times.connect_s)
        # Servers close idle connections after 5 s or more; a client that does so first never races them.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        self._http = aiohttp.ClientSession(
            timeout=timeout, connector=connector, headers={"Content-Type": "application/json"}
        )

    async def close(self) -> None:
        tasks = [engine.probe for engine in self._engines.values() if engine.probe] + list(self._aborts)
        for engine in self._engines.values():
            if engine.probe:
                engine.probe.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    # -- membership ------------------------------------------------------------------------------

    async def add(self, url: str, wait_s: float = 0.0) -> Engine:
        """Take an engine in; waits up to `wait_s` for its first probe to end. Idempotent."""
        url = url.rstrip("/")
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = Engine(url)
            engine.probe = asyncio.create_task(self._watch(engine), name=f"probe {url}")
            engine.probe.add_done_callback(self._probe_ended)
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await engine.probed.wait()
        return engine

    async def remove(self, url: str) -> bool:
        """Give it no new calls; those under way go on. Whether it was there."""
        engine = self._engines.pop(url.rstrip("/"), None)
        if engine is None:
            return False
        engine.healthy = False
        if engine.probe is not None:
            engine.probe.cancel()
        return True

    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def max_context(self) -> int | None:
        """The smallest context among the engines that told theirs."""
        known = [engine.max_context for engine in self._engines.values() if engine.max_context]
        return min(known, default=None)

    # -- sampling --------------------------------------------------------------------------------

    async def sample(
        self, order: Order, seat: Seat, deadline: float, on_ids: Callable[[list[int]], None] | None = None
    ) -> Sampled:
        """Sample one reply, whatever happens to engines meanwhile; `deadline` is in the loop's time.

        `on_ids` is called with all ids so far as a stream brings them. Cancelling aborts upstream.
        Raises EngineError, never retryable: the deadline passed, or an engine answered nonsense.
        """
        sampled = Sampled()
        wait, last = _FIRST_WAIT_S, "there is no engine"
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    engine = await self._choose(seat)
                    before = len(sampled.ids)
                    try:
                        await self._call(engine, order, sampled, on_ids)
                    except EngineError as error:
                        if not error.retryable:
                            raise
                        last = str(error)
                        log.info("%s; trying again", error)
                    if sampled.finish in ("stop", "length"):
                        return sampled
                    if len(sampled.ids) >= order.max_new_tokens:
                        sampled.finish = "length"
                        return sampled
                    wait = _FIRST_WAIT_S if len(sampled.ids) > before else min(wait * 2, _LONGEST_WAIT_S)
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))
        except TimeoutError:
            raise EngineError(f"no engine answered before the session's deadline; last: {last}") from None

    async def _choose(self, seat: Seat) -> Engine:
        """The session's own engine while it is healthy, else the one with the fewest calls."""
        if seat.engine is not None and seat.engine.healthy:
            return seat.engine
        while True:
            healthy = [engine for engine in self._engines.values() if engine.healthy]
            if healthy:
                seat.engine = min(healthy, key=lambda engine: (len(engine.calls), engine.failures))
                return seat.engine
            async with self._changed:
                await self._changed.wait()

    async def _call(
        self, engine: Engine, order: Order, sampled: Sampled, on_ids: Callable[[list[int]], None] | None
    ) -> None:
        """One `/generate`; adds to `sampled` what it gave, also where a stream broke off."""
        # Engines match ids by prefix when they abort, so no id may begin another one: fixed length.
        rid = uuid.uuid4().hex
        begun = list(sampled.ids)
        piece = Sampled()

        def take(newer: Sampled) -> None:
            nonlocal piece
            piece = newer
            if on_ids is not None:
                on_ids(begun + newer.ids)

        try:
            async with asyncio.timeout(None) as timeout:
                engine.calls[rid] = timeout
                await self._exchange(engine, request_body(order, sampled, rid), order.stream, take)
            engine.failures = 0
        except (aiohttp.ClientError, OSError) as error:
            self._fail(engine, quarantine=True)
            if isinstance(error, TimeoutError):  # the probe gave the engine up
                self._abort_later(engine, rid)
            if len(piece.logprobs) != len(piece.ids):
                raise EngineError(
                    f"{engine.url}: its stream broke off after tokens without logprobs"
                ) from error
            raise EngineError(
                f"{engine.url}: {str(error) or type(error).__name__}", retryable=True
            ) from error
        except EngineError as error:
            self._fail(engine, quarantine=False, counts=error.retryable)
            raise
        except asyncio.CancelledError:
            self._abort_later(engine, rid)
            raise
        finally:
            engine.calls.pop(rid, None)
            # A stream that broke off: what it delivered stays, and is continued.
            sampled.extend(piece)

    async def _exchange(
        self, engine: Engine, body: bytes, stream: bool, take: Callable[[Sampled], None]
    ) -> None:
        assert self._http is not None, "the pool is not started"
        async with self._http.post(engine.url + "/generate", data=body) as response:
            if response.status != 200:
                raise _refused(engine, response.status, await response.read())
            if not stream:
                take(read_reply(_load(engine, await response.read())))
                return
            buffer = b""
            async for chunk in response.content.iter_any():
                events = (buffer + chunk).split(b"\n\n")
                buffer = events.pop()
                data = [event[5:].strip() for event in events if event.startswith(b"data:")]
                newest = next((one for one in reversed(data) if one != b"[DONE]"), None)
                if newest is not None:
                    # Events are cumulative: of several that came together the newest says it all.
                    piece = read_reply(_event(engine, newest), partial=True)
                    take(piece)
                    if piece.finish:
                        return
            raise aiohttp.ServerDisconnectedError("the stream broke off")

    # -- health ----------------------------------------------------------------------------------

    def _fail(self, engine: Engine, *, quarantine: bool, counts: bool = True) -> None:
        self.errors += 1
        engine.failures += counts
        if quarantine or engine.failures >= _FAILURES_TO_QUARANTINE:
            self._quarantine(engine)

    def _quarantine(self, engine: Engine) -> None:
        engine.healthy = False
        if not engine.quarantined:
            engine.quarantined = True
            log.warning("%s is in quarantine until it answers /model_info", engine.url)
        engine.wake.set()

    async def _watch(self, engine: Engine) -> None:
        """Probe one engine for ever: soon after a failure, at leisure while it is well."""
        wait = _FIRST_WAIT_S
        silent = 0
        while True:
            answer = await self._probe(engine)
            silent = silent + 1 if answer is None else 0
            if answer:
                wait = _FIRST_WAIT_S
                if not engine.healthy:
                    if engine.quarantined:
                        log.warning("%s is back", engine.url)
                    engine.healthy, engine.quarantined, engine.failures = True, False, 0
                    await self._notify()
                pause = self._times.probe_every_s
            elif silent and silent < _SILENCES_TO_QUARANTINE:
                pause = _FIRST_WAIT_S
            else:
                self._quarantine(engine)
                for timeout in engine.calls.values():
                    timeout.reschedule(0.0)
                engine.calls.clear()
                wait = min(wait * 2, self._times.probe_every_s)
                pause = wait * random.uniform(0.5, 1.0)
            engine.probed.set()
            engine.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await engine.wake.wait()
            await asyncio.sleep(0.01)  # what was woken by a burst of failures probes once

    async def _probe(self, engine: Engine) -> bool | None:
        """Whether the engine answers; None where it is silent for the probe's whole time."""
        assert self._http is not None, "the pool is not started"
        timeout = aiohttp.ClientTimeout(total=self._times.probe_timeout_s)
        try:
            async with self._http.get(engine.url + "/model_info", timeout=timeout) as response:
                info = orjson.loads(await response.read())
                if response.status != 200 or not isinstance(info, dict):
                    return False
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError, orjson.JSONDecodeError):
            return False
        context = info.get("max_context")
        engine.max_context = context if type(context) is int and context > 0 else None
        engine.weight_version = str(info.get("weight_version"))
        return True

    def _probe_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._on_death(f"{task.get_name()} ended: {task.exception()!r}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _abort_later(self, engine: Engine, rid: str) -> None:
        task = asyncio.create_task(self._abort(engine, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, engine: Engine, rid: str) -> None:
        """Free the engine of a request that nobody waits for; an engine that is gone has none."""
        assert self._http is not None, "the pool is not started"
        timeout = aiohttp.ClientTimeout(total=self._times.connect_s)
        body = orjson.dumps({"rid": rid})
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._http.post(engine.url + "/abort_request", data=body, timeout=timeout):
                pass


def _load(engine: Engine, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EngineError(f"{engine.url} answered what is not JSON: {data[:200]!r}") from None


def _event(engine: Engine, data: bytes) -> Any:
    payload = _load(engine, data)
    if isinstance(payload, dict) and "error" in payload:
        error = payload["error"]
        status = error.get("code") if isinstance(error, dict) else None
        raise _refused(engine, status if isinstance(status, int) else 500, data)
    return payload


def _refused(engine: Engine, status: int, data: bytes) -> EngineError:
    return EngineError(
        f"{engine.url} answered {status}: {data[:300].decode(errors='replace')}",
        retryable=status in RETRYABLE,
    )
