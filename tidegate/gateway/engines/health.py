"""Whether an engine is well: quarantine after failures, and back as soon as it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any

from tidegate.gateway.engines.client import EngineClient, ProbeTimeout
from tidegate.gateway.engines.engine import DEFAULT_CALLS, EngineEndpoint

log = logging.getLogger("tidegate.gateway.engines.engine")

_FAILURES_TO_QUARANTINE = 3
_SILENCES_TO_QUARANTINE = 2
_FIRST_WAIT_S = 0.05


class HealthProbe:
    """Probes one engine for ever: soon after a failure, at leisure while it is well.

    `on_change(engine)` is called when it came up, went down, or tells another limit. Where a trainer leads
    (`led`), one that comes back from quarantine with other weights waits for it.
    """

    def __init__(
        self,
        engine: EngineEndpoint,
        wire: EngineClient,
        every_s: float,
        most_calls: Callable[[int | None], int],
        on_change: Callable[[EngineEndpoint], None],
        led: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._wire = wire
        self._every_s = every_s
        self._most_calls = most_calls
        self._on_change = on_change
        self._led = led
        self._wake = asyncio.Event()
        self.probed = asyncio.Event()
        """The first probe ended."""

    def failed(self, *, at_once: bool, counts: bool = True) -> None:
        """A call failed; `at_once`: no other one can do better."""
        self._engine.failures += counts
        if at_once or self._engine.failures >= _FAILURES_TO_QUARANTINE:
            self._quarantine()

    async def run(self) -> None:
        wait = _FIRST_WAIT_S
        silent = 0
        while True:
            before = self._engine.weight_version
            try:
                answered = await self._probe()
                silent = 0
            except ProbeTimeout:
                answered, silent = False, silent + 1
            if answered:
                wait = _FIRST_WAIT_S
                self._well(before)
                pause = self._every_s
            elif 0 < silent < _SILENCES_TO_QUARANTINE:
                pause = _FIRST_WAIT_S
            else:
                self._quarantine()
                for timeout in self._engine.calls.values():
                    timeout.reschedule(0.0)
                self._engine.calls.clear()
                wait = min(wait * 2, self._every_s)
                pause = wait * random.uniform(0.5, 1.0)
            self.probed.set()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            await asyncio.sleep(0.01)  # what was woken by a burst of failures probes once

    def _well(self, version_before: str | None) -> None:
        engine = self._engine
        if not engine.healthy:
            if engine.quarantined:
                log.warning("%s is back", engine.url)
                other = version_before is not None and engine.weight_version != version_before
                engine.admitted = engine.admitted and not (other and self._led())
            engine.healthy, engine.quarantined, engine.failures = True, False, 0
        self._on_change(engine)

    def _quarantine(self) -> None:
        engine = self._engine
        was, engine.healthy = engine.healthy, False
        if not engine.quarantined:
            engine.quarantined = True
            log.warning("%s is in quarantine until it answers /model_info", engine.url)
        if was:
            self._on_change(engine)
        self._wake.set()

    async def _probe(self) -> bool:
        """Whether it answers; what it says of itself is noted."""
        engine = self._engine
        routed = engine.control != (engine.url,)
        if routed and not await self._wire.well(engine.url):
            return False
        told = await asyncio.gather(*(self._info(url, routed) for url in engine.control))
        infos = [info for info in told if info is not None]
        if not infos:
            return False
        engine.max_context = min(filter(None, (_positive(one, "max_context") for one in infos)), default=None)
        slots = [_positive(one, "max_slots") for one in infos]
        engine.limit = self._most_calls(None if None in slots else sum(filter(None, slots)))
        versions = sorted({str(one.get("weight_version")) for one in infos})
        engine.weight_version = ", ".join(versions)  # several: the engines behind a router differ
        return True

    async def _info(self, url: str, routed: bool) -> dict[str, Any] | None:
        """One of several that is silent is the router's affair."""
        try:
            return await self._wire.info(url)
        except ProbeTimeout:
            if routed:
                return None
            raise


def most_calls(slots: int | None, fixed: int | None, shards: int) -> int:
    """How many calls at once one gateway (of so many shards) sends to an engine with so many slots.

    Twice the slots: what the engine has in hand covers the time until the next call reaches it, and the
    rest of the line is ordered here, where turns are taken.
    """
    whole = fixed or (2 * slots if slots is not None else DEFAULT_CALLS)
    return max(1, -(-whole // shards))


def _positive(info: dict[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None
