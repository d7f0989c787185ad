"""Publish: make a new policy version live on every engine.

    write the weights → end what can no longer be admitted → pause → load or send → verify → resume

Every move may be repeated safely, and the engines are resumed whatever happens. `retract` is the pause
mode: running requests keep their tokens, and their KV is computed again under the new weights.
An engine that cannot be brought to the version is reported, so that its owner restarts or removes it.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tidegate import failpoints
from tidegate.errors import EngineError, PublishError, StartError
from tidegate.trainer.publish.broadcast import WeightBroadcaster
from tidegate.trainer.publish.engine_control import EngineControl

KEPT = 2
ATTEMPTS_BESIDE_OTHERS = 3
BACKOFF_S = 1.0
BACKOFF_MAX_S = 8.0


async def _seen(url: str, weights: Path) -> Path:
    """Every engine sees the directory."""
    return weights


@dataclass(slots=True)
class Publisher:
    """Publishes to all engines at once.

    `directory` is absolute, as engines have working directories of their own.
    `save(directory)` writes the weights; `engines()` names the engines' URLs at this moment;
    `cancel_doomed(version)` ends what the new version makes inadmissible; `quarantine(url, why)` takes an
    engine out of service that could not be brought to the version while others could, and `restore(url)`
    puts it back once it is at what is live. `out` are those out of service.
    `live` is the newest version's directory and number: where a restarted engine comes up.
    `patience_s` is how long engines are waited for when none can be brought to the version: as long as one
    that died may take to be started again.
    """

    directory: Path
    save: Callable[[Path], object]
    engines: Callable[[], Sequence[str]]
    cancel_doomed: Callable[[int], Awaitable[None]]
    quarantine: Callable[[str, str], Awaitable[None]]
    restore: Callable[[str], Awaitable[None]]
    live: tuple[Path, int]
    patience_s: float
    sender: WeightBroadcaster | None = None
    """Sends the weights to the engines; None: they read the files. Those it fails with read them then."""
    place: Callable[[str, Path], Awaitable[Path]] = _seen
    """Where the engine at a URL finds what lies in a directory here. Raises StartError, OSError."""
    waits: Callable[[], bool] = lambda: False
    """Whether engines are waited for beyond that: an outage is on, which has a limit of its own."""
    out: set[str] = field(default_factory=set)
    _expected: set[str] = field(default_factory=set)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def publish(self, version: int) -> None:
        """Make `version` live. Raises PublishError where no engine could be brought to it."""
        weights = self.directory / f"v{version:06d}"
        with failpoints.around("publish.weights"):
            await asyncio.to_thread(self.save, weights)
        await self.cancel_doomed(version)
        self.live = (weights, version)
        await self.bring_all(self.sender)
        self._prune()

    async def bring_all(self, sender: WeightBroadcaster | None = None) -> None:
        """Bring every engine to what is live: also engines of others, whose weights nobody knows.

        One that fails while others don't is tried `ATTEMPTS_BESIDE_OTHERS` times and then out of service;
        from the next publish on at which it answers it is back. With a `sender` those read the files to whom
        the policy's weights could not be sent. Raises PublishError where none is left.
        """
        async with self._one_at_a_time, aiohttp.ClientSession() as http:
            weights, version = self.live
            silent = await self._silent(http)
            sent: set[str] = set()
            if sender is not None:
                urls = self.engines()
                sender.retain(urls)
                engines = [EngineControl(url, http) for url in urls if url not in silent]
                sent = await sender.send(engines, version)
            brought, failed = await self._rounds(http, weights, version, silent, sent)
        if not brought:
            reasons = "; ".join(str(one) for one in failed.values()) or "the run has none"
            raise PublishError(f"version {version} could not be published to any engine: {reasons}")
        for url in self.out & brought:
            self.out.discard(url)
            self._expected.discard(url)
            await self.restore(url)
        for url in failed.keys() - (self.out - self._expected):
            self.out.add(url)
            self._expected.discard(url)
            await self.quarantine(url, str(failed[url]))

    async def check_samples(self) -> None:
        """Raises UnfitEngineError where there is an engine whose tokens could not be trained on. One that
        does not answer is its owner's matter."""
        async with aiohttp.ClientSession() as http:
            checks = [EngineControl(url, http).check_sample() for url in self.engines()]
            for result in await asyncio.gather(*checks, return_exceptions=True):
                if isinstance(result, BaseException) and not (
                    isinstance(result, EngineError) and result.retryable
                ):
                    raise result

    async def bring(self, url: str) -> int:
        """Have a newcomer, whatever weights it has, read what is live; that version.

        Raises EngineError; UnfitEngineError where its tokens could not be trained on.
        """
        weights, version = self.live
        async with aiohttp.ClientSession() as http:
            engine = EngineControl(url, http)
            await engine.check_sample()
            await self._read(engine, weights, version)
        self.out.discard(url)
        return version

    async def refresh(self, url: str) -> bool:
        """Bring an engine that was started again to what is live; whether it is there now.

        One that does not answer may do so later; one that refuses is out of service, and brought to a
        version by publishes alone.
        """
        async with self._one_at_a_time, aiohttp.ClientSession() as http:
            weights, version = self.live
            engine = EngineControl(url, http)
            label = await engine.label()
            if label == str(version) and url not in self._expected:
                self.out.discard(url)
                return True
            if label is None or url in self.out:
                return False
            try:
                await self._read(engine, weights, version)
                return True
            except EngineError as error:
                if error.retryable:
                    return False
                self.out.add(url)
                why = str(error)
        await self.quarantine(url, why)
        return False

    async def attested(self, urls: Sequence[str]) -> bool:
        """Whether all of them attest what is live."""
        async with aiohttp.ClientSession() as http:
            labels = await asyncio.gather(*(EngineControl(url, http).label() for url in urls))
        return set(labels) == {str(self.live[1])}

    def expect(self, urls: Iterable[str]) -> None:
        """They are out of service; the next publish tells of them whether it could bring them to it."""
        self.out.update(urls)
        self._expected.update(urls)

    async def _rounds(
        self, http: aiohttp.ClientSession, weights: Path, version: int, silent: set[str], sent: set[str]
    ) -> tuple[set[str], dict[str, EngineError]]:
        """Load on all others than those, then again on who may yet succeed. Who did, and why others did not.

        Who is there is asked anew for each round: one that dies may come back elsewhere.
        """
        deadline, pause_s = time.monotonic() + self.patience_s, BACKOFF_S
        brought = set(sent)
        failed: dict[str, EngineError] = {}
        for attempt in itertools.count(1):
            present = [url for url in self.engines() if url not in silent]
            failed = {url: error for url, error in failed.items() if url in present}
            over_with = {url for url, one in failed.items() if not one.retryable or url in self.out} | brought
            trying = [url for url in present if url not in over_with]
            if self.waits():
                deadline = time.monotonic() + self.patience_s
            over = attempt > ATTEMPTS_BESIDE_OTHERS if brought else time.monotonic() >= deadline
            if not trying or (over and attempt > 1):
                break
            if attempt > 1:  # a killed engine is being started again meanwhile, and comes up at `live`
                await asyncio.sleep(pause_s)
                pause_s = min(BACKOFF_MAX_S, 2 * pause_s)
            engines = [EngineControl(url, http) for url in trying]
            results = await asyncio.gather(*(self._load(one, weights, version) for one in engines))
            for url, error in zip(trying, results, strict=True):
                failed.pop(url, None)
                if error is None:
                    brought.add(url)
                else:
                    failed[url] = error
        return brought, failed

    async def _silent(self, http: aiohttp.ClientSession) -> set[str]:
        """Those out of service that do not say that they are there again."""
        out = [url for url in self.engines() if url in self.out]
        labels = await asyncio.gather(*(EngineControl(url, http).label() for url in out))
        return {url for url, label in zip(out, labels, strict=True) if label is None}

    async def _load(self, engine: EngineControl, weights: Path, version: int) -> EngineError | None:
        try:
            await self._read(engine, weights, version)
        except EngineError as error:
            return error
        return None

    async def _read(self, engine: EngineControl, weights: Path, version: int) -> None:
        """Have an engine read the weights, brought to its node before it is paused. Raises EngineError."""
        try:
            there = await self.place(engine.url, weights)
        except (StartError, OSError) as error:
            raise EngineError(
                f"engine {engine.url}: the weights did not come to its node: {error}", retryable=True
            ) from error
        await engine.load(there, version)

    def _prune(self) -> None:
        """Keep the last two published versions, whichever start of the run published them; no version comes
        twice, so what another start left half-written goes too."""
        published = sorted(self.directory.glob("v*"), key=lambda one: (len(one.name), one.name))
        for old in published[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
