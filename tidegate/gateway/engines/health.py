"""Probes the health of engines: quarantine after failures, release after a successful probe."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from tidegate.gateway.engines.client import EngineClient, ProbeTimeout
from tidegate.gateway.engines.engine import DEFAULT_CALLS, EngineEndpoint, PoolOptions
from tidegate.gateway.engines.protocol import read_version
from tidegate.service.backoff import backoff_s
from tidegate.weights.adapter_files import split_label

log = logging.getLogger("tidegate.gateway.engines.engine")

_FAILURES_TO_QUARANTINE = 3
_TIMEOUTS_TO_QUARANTINE = 2
_FIRST_WAIT_S = 0.05


class HealthProbe:
    """Probes one engine until cancelled, at an interval, and sooner after a failure. `on_change(engine)` is
    called after a successful probe and when the engine goes down. If `trainer_managed`, an engine that leaves
    quarantine with other weights waits until the trainer admits it. The calls of an engine that hangs end if
    `others_serve`, which then get them: otherwise it may still finish them."""

    def __init__(
        self,
        engine: EngineEndpoint,
        client: EngineClient,
        options: PoolOptions,
        on_change: Callable[[EngineEndpoint], None],
        trainer_managed: Callable[[], bool],
        others_serve: Callable[[], bool] = lambda: True,
    ) -> None:
        self._engine = engine
        self._client = client
        self._options = options
        self._on_change = on_change
        self._trainer_managed = trainer_managed
        self._others_serve = others_serve
        self._wake = asyncio.Event()
        self._probing = asyncio.Lock()
        self.probed = asyncio.Event()
        """Set after the first probe."""
        self.task = asyncio.create_task(self._run(), name=f"probe {engine.url}")

    def failed(self, *, at_once: bool, counts: bool = True) -> None:
        """Record a failed call; `at_once` quarantines without waiting for further failures."""
        self._engine.failures += counts
        if at_once or self._engine.failures >= _FAILURES_TO_QUARANTINE:
            self._quarantine()

    async def refresh(self) -> bool:
        """Read the engine's version now; returns whether it answers."""
        with contextlib.suppress(ProbeTimeout):
            if await self._probe():
                self._on_change(self._engine)
                return True
        return False

    async def _run(self) -> None:
        failures = timeouts = 0
        silent_since, loop = 0.0, asyncio.get_running_loop()
        while True:
            version_before, began = self._engine.weight_version, loop.time()
            try:
                ok = await self._probe()
                timeouts = 0
            except ProbeTimeout:
                # An engine that is too busy to answer, but delivers tokens, does not hang.
                if timeouts == 0 or self._engine.seen > silent_since:
                    silent_since, timeouts = began, 0
                ok, timeouts = False, timeouts + 1
            if ok:
                failures = 0
                self._recover(version_before)
                pause = self._options.probe_every_s
            elif 0 < timeouts < _TIMEOUTS_TO_QUARANTINE:
                pause = _FIRST_WAIT_S
            else:
                self._quarantine()
                if self._others_serve():
                    # An expired deadline ends the calls as timeouts, which the pool retries on another
                    # engine.
                    for timeout in self._engine.calls.values():
                        timeout.reschedule(0.0)
                    self._engine.calls.clear()
                failures += 1
                pause = backoff_s(failures, _FIRST_WAIT_S, self._options.probe_every_s)
            self.probed.set()
            # After `_quarantine`, which sets it: its own wake-up must not skip the pause.
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            await asyncio.sleep(0.01)  # a burst of failures causes one probe

    def _recover(self, version_before: str | None) -> None:
        engine = self._engine
        if not engine.healthy:
            if engine.quarantined:
                log.warning("engine %s responds again; its quarantine has ended", engine.url)
                changed = version_before is not None and engine.weight_version != version_before
                engine.admitted = engine.admitted and not (changed and self._trainer_managed())
            engine.healthy, engine.quarantined, engine.failures = True, False, 0
        self._on_change(engine)

    def _quarantine(self) -> None:
        engine = self._engine
        was_healthy, engine.healthy = engine.healthy, False
        if not engine.quarantined:
            engine.quarantined = True
            log.warning("engine %s is in quarantine until it responds to /model_info", engine.url)
        if was_healthy:
            self._on_change(engine)
        self._wake.set()

    async def _probe(self) -> bool:
        """Whether the engine answers; updates its context length, limit and weight version."""
        async with self._probing:  # so that an older answer never replaces a newer one
            return await self._probe_once()

    async def _probe_once(self) -> bool:
        engine = self._engine
        routed = engine.control != (engine.url,)
        if routed and not await self._client.is_healthy(engine.url):
            return False
        replies = await asyncio.gather(*(self._info(url, routed) for url in engine.control))
        infos = [info for info in replies if info is not None]
        if not infos:
            return False
        engine.seen = now = asyncio.get_running_loop().time()
        sampled = [_positive(info, "tokens_sampled") for info in infos]
        engine.note_sampled(now, None if None in sampled else sum(filter(None, sampled)))
        engine.max_context = min(
            filter(None, (_positive(info, "max_context") for info in infos)), default=None
        )
        engine.limit = self._limit([_positive(info, "max_slots") for info in infos])
        adapters = dict(split_label(str(info.get("weight_version"))) for info in infos)
        versions = sorted(adapters)
        engine.weight_version = ", ".join(versions)  # engines behind a router may differ
        numbers = [number for label in versions if (number := read_version(label)) is not None]
        if len(infos) == len(replies) and len(numbers) == len(versions):
            engine.version, oldest = min(zip(numbers, versions, strict=True))
            engine.adapter = adapters[oldest]
        return True

    def _limit(self, slots: list[int | None]) -> int:
        """Returns the limit of concurrent calls from this gateway, one of several shards. It is twice the
        slots: the engine's own queue bridges the time until the next call arrives, and further calls wait in
        the gateway's fair queue."""
        reported = DEFAULT_CALLS if None in slots else 2 * sum(filter(None, slots))
        return max(1, -(-(self._options.engine_calls or reported) // self._options.shards))

    async def _info(self, url: str, routed: bool) -> dict[str, Any] | None:
        """`/model_info` of one engine; a timeout behind a router is left to the router."""
        try:
            return await self._client.info(url)
        except ProbeTimeout:
            if routed:
                return None
            raise


def _positive(info: dict[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None
