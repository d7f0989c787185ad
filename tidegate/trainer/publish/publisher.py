"""Publishes a new policy version to every engine.

    write the weights → cancel groups that become stale → pause → load → verify → resume

All weights that are sent to the engines (`trainer.publish_transport = "broadcast"`) are sent before they are
written, so that the engines do not wait for the disk. If every engine then serves the version, a copy is
written during the next step.

Every step may be repeated safely, and engines are always resumed. Engines pause in the mode `retract`:
running requests keep their tokens, and their keys and values are recomputed with the new weights. With
`engine.pause = "in_place"` a publish leaves them to engines that have the version before; any other load
drops them. An engine that cannot be updated is reported, so that its owner restarts or removes it.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp

from tidegate import failpoints
from tidegate.errors import EngineError, PublishError, StartError
from tidegate.service.backoff import backoff_s
from tidegate.trainer.publish.broadcast import Keep, WeightBroadcaster
from tidegate.trainer.publish.engine_control import (
    EngineControl,
    Errors,
    SampleCheck,
    error_of,
    refusal_in,
    switch_adapters,
)
from tidegate.trainer.publish.version_writer import VersionWriter
from tidegate.trainer.waits import run_to_completion
from tidegate.weights import delta_files

KEPT_VERSIONS = 2  # an engine may still be loading the version before the newest
ATTEMPTS_BESIDE_OTHERS = 3
BACKOFF_S, BACKOFF_MAX_S = 1.0, 8.0

T = TypeVar("T")


async def _shared_directory(url: str, weights: Path) -> Path:
    """Deliver weights through a shared directory."""
    return weights


async def _no_ledger() -> None: ...


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Publishes to all engines at the same time.

    Args:
        writer: writes the versions; its directory is absolute, as engines have other working directories.
        engines: returns the current control URLs of the engines.
        cancel_stale: cancels groups that become too stale with a version.
        quarantine: takes an engine out of service, with a reason; called if other engines could be updated.
        restore: returns an updated engine to service.
        current: directory and number of the newest version; `files` waits for its files.
        retry_s: how long to retry if no engine can be updated: the time that a restart may take.
    """

    writer: VersionWriter
    engines: Callable[[], Sequence[str]]
    cancel_stale: Callable[[int], Awaitable[None]]
    quarantine: Callable[[str, str], Awaitable[None]]
    restore: Callable[[str], Awaitable[None]]
    current: tuple[Path, int]
    retry_s: float
    sender: WeightBroadcaster | None = None
    """Sends the weights to engines, which load files only if that fails; None: all load files."""
    deliver: Callable[[str, Path], Awaitable[Path]] = _shared_directory
    """Delivers a directory to the engine at a URL; returns its path there. Raises StartError, OSError."""
    in_outage: Callable[[], bool] = lambda: False
    """Whether to retry beyond `retry_s`: an outage has a limit of its own."""
    durable: Callable[[], Awaitable[None]] = _no_ledger
    """Forces the ledger to disk before a version exists, so that no start reuses its number."""
    kept: Path | None = None
    """Directory of a published version that is not removed."""
    serves: Callable[[str], str] = lambda url: ""
    """Returns the name of the policy or the policies that the engine at a URL serves; "" with one policy."""
    kept_versions: int = KEPT_VERSIONS
    """Number of versions whose directories are kept."""
    keeps_kv: bool = False
    """Whether running requests keep their keys and values (`engine.pause = "in_place"`)."""
    samples: SampleCheck = field(default_factory=SampleCheck)
    """What engines must report of tokens."""
    announce: Callable[[str], Awaitable[None]] | None = None
    """Has the gateway name the adapters that an engine serves now; None: requests name none."""
    unavailable: set[str] = field(default_factory=set)
    """URLs of the engines that are out of service."""
    startable: tuple[Path, int] = field(init=False)
    """Directory and number of the newest version with all weights, with which restarted engines start."""
    _earlier: Path = field(init=False)
    """Directory of the version before the current one, which an engine may still be loading."""
    _writing: asyncio.Task[None] | None = None
    """Writes the files of the current version."""
    _pending: set[str] = field(default_factory=set)
    _update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.startable = self.current
        self._earlier = self.current[0]

    async def publish(self, version: int) -> None:
        """Write the weights and load them on the engines.

        Raises OSError, also if the files of the version before could not be written, and PublishError if all
        engines fail.
        """
        began = time.monotonic()
        await self.files()
        await self.durable()
        write = self.writer.write if self.sender is None else self.writer.write_delta
        await self._go_live(await self._write(write, version), version)
        self.writer.on_published(time.monotonic() - began)

    async def publish_start(self) -> None:
        """Write the version with which a run with several policies starts, and load it.

        Shared engines, which load adapters, cannot load the base models or the checkpoint.

        Raises OSError, and PublishError if all engines fail.
        """
        version = self.current[1]
        self._set_current(await self._write(self.writer.write_full, version), version)
        await self.update_all()
        await self._switch_adapters(set(self.engines()) - self.unavailable, version)

    async def _write(self, write: Callable[[int], T], version: int) -> T:
        with failpoints.around("publish.weights"):
            # Not abandoned by a cancellation: the final checkpoint needs the policy, and all its ranks, too.
            return await run_to_completion(asyncio.to_thread(write, version))

    async def files(self) -> tuple[Path, int]:
        """Return `current` when its files are complete. Raises OSError if they could not be written."""
        current = self.current
        if self._writing is not None:
            await asyncio.shield(self._writing)
        return current

    async def write_candidate(self, version: int) -> Path:
        """Write the weights of a version that is tested first; engines that start get the current one."""
        await self.files()
        await self.durable()
        return await self._write(self.writer.write_candidate, version)

    async def load_candidate(self, urls: Sequence[str], weights: Path, version: int) -> bool:
        """Load a candidate on engines that do not have it; returns whether all have it now."""
        async with self._update_lock, aiohttp.ClientSession() as http:
            engines = [EngineControl(url, http) for url in urls]
            labels = await asyncio.gather(*(engine.probe_label() for engine in engines))
            without = [engine for engine, label in zip(engines, labels, strict=True) if label != str(version)]
            errors = await self._load(without, weights, version)
        if (refusal := refusal_in(errors)) is not None:
            raise PublishError(f"candidate {version} could not be loaded: {refusal}")
        return not any(errors)

    async def publish_candidate(self, weights: Path, version: int) -> None:
        """Make a candidate the current version, and load it on every engine."""
        await self.durable()
        with failpoints.around("publish.promoted"):
            live = await asyncio.to_thread(self.writer.promote, weights, version)
        await self._go_live(live, version)

    async def discard_candidate(self, weights: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, weights, ignore_errors=True)

    async def _go_live(self, weights: Path | None, version: int) -> None:
        """Load a version on every engine; without a directory its weights are sent first and then written."""
        # Before engines pause: afterwards they would recompute the keys and values of these groups' requests.
        await self.cancel_stale(version)
        # Read before the new version becomes the current one.
        keep_kv_of = self.current[1] if self.keeps_kv else None
        async with self._update_lock, aiohttp.ClientSession() as http:
            skipped, loaded = await self._unresponsive(http), set[str]()
            if weights is None:
                self.writer.begin_sending()
                loaded = await self._send(http, version, skipped, keep_kv_of, self.writer.keep)
                without = [url for url in self.engines() if url not in skipped | loaded]
                # With all buckets, which an engine has, and no engine that waits for files.
                later = bool(loaded) and not without and self.writer.can_write_sent()
                await (self._write_later(version) if later else self._write_now(http, version, without))
            else:
                self._set_current(weights, version)
                if delta_files.is_delta(weights):
                    loaded = await self._load_delta(http, weights, version, skipped)
                loaded |= await self._send(http, version, skipped | loaded, keep_kv_of)
            updated, failed = await self._update_in_rounds(http, skipped, loaded, keep_kv_of)
        await self._set_service(updated, failed)
        await self._switch_adapters(updated, version)
        roots = {self.current[0], self._earlier, self.kept or self.current[0]}
        await asyncio.to_thread(self.writer.prune, self.kept_versions, roots)

    async def _write_now(self, http: aiohttp.ClientSession, version: int, without: list[str]) -> None:
        """Write the weights for the engines that are without them."""
        try:
            weights = await self._write(self.writer.write_full, version)
        except BaseException:  # the transfer has left them paused, with weights of no version
            await self._load([EngineControl(url, http) for url in without], *self.current)
            raise
        self._set_current(weights, version)

    async def _write_later(self, version: int) -> None:
        """Begin to write the weights that were sent."""

        async def write() -> None:
            self.startable = (await self._write(self.writer.write_sent, version), version)

        self._set_current(self.writer.place(version), version, written=False)
        self._writing = asyncio.create_task(write(), name=f"files of version {version}")

    def _set_current(self, weights: Path, version: int, *, written: bool = True) -> None:
        if version != self.current[1]:  # else all weights replace a refused difference
            self._earlier = self.current[0]
        self.current = (weights, version)
        self._writing = None
        if written and not delta_files.is_delta(weights):
            self.startable = self.current

    async def update_all(self) -> None:
        """Load the current version's files on every engine, including external ones with unknown weights.

        If other engines succeed, a failing one is taken out of service after ATTEMPTS_BESIDE_OTHERS attempts;
        the next publish to which it responds restores it.

        Raises:
            PublishError: if no engine could be updated.
        """
        async with self._update_lock, aiohttp.ClientSession() as http:
            skipped = await self._unresponsive(http)
            updated, failed = await self._update_in_rounds(http, skipped, set())
        await self._set_service(updated, failed)
        # Their labels prove nothing: they may have a base model, or weights of another run.
        self._pending |= self.unavailable

    async def _set_service(self, updated: set[str], failed: dict[str, EngineError]) -> None:
        """Return updated engines to service and take failed ones out of it.

        Raises PublishError without an updated one.
        """
        served = set(map(self.serves, updated))
        if without := {self.serves(url) for url in failed if self.serves(url) not in served} or (
            set() if updated else {""}
        ):
            errors = [error for url, error in failed.items() if self.serves(url) in without]
            of = f" of the policy {min(without)}" if any(without) else ""
            raise PublishError(
                f"version {self.current[1]} could not be published to any engine{of}: "
                f"{'; '.join(map(str, errors)) or 'the run has none'}"
            )
        for url in self.unavailable & updated:
            self.unavailable.discard(url)
            self._pending.discard(url)
            await self.restore(url)
        # An engine out of service was reported before; a pending one was only set aside by its owner.
        for url in failed.keys() - (self.unavailable - self._pending):
            self.unavailable.add(url)
            self._pending.discard(url)
            await self.quarantine(url, str(failed[url]))

    async def _switch_adapters(self, urls: Iterable[str], version: int) -> None:
        if self.announce is not None:
            await switch_adapters({url: bool(self.serves(url)) for url in urls}, version, self.announce)

    async def _send(
        self, http: aiohttp.ClientSession, version: int, skipped: set[str], keep_kv_of: int | None,
        keep: Keep | None = None,
    ) -> set[str]:  # fmt: skip
        """Send all weights to the engines that are not skipped; returns the URLs of those that have them."""
        if self.sender is None:
            return set()
        urls = self.engines()
        self.sender.retain(urls)
        engines = [EngineControl(url, http, keep_kv_of) for url in urls if url not in skipped]
        return await self.sender.send(engines, version, keep) if engines else set()

    async def _load_delta(
        self, http: aiohttp.ClientSession, weights: Path, version: int, skipped: set[str]
    ) -> set[str]:
        """Load a difference, or send it; if an engine refuses it, write all weights as the current version.

        Returns the URLs of the engines that loaded it.
        """
        engines = [EngineControl(url, http) for url in self.engines() if url not in skipped]
        if self.sender is not None:
            data = await asyncio.to_thread((weights / delta_files.FILE).read_bytes)
            sends = (engine.send_difference(data, version) for engine in engines)
            errors: Errors = await asyncio.gather(*map(error_of, sends))
        else:
            errors = await self._load(engines, weights, version)
        if (refusal := refusal_in(errors)) is not None:
            self.writer.on_refused(str(refusal))
            full = await run_to_completion(asyncio.to_thread(self.writer.write_full, version))
            self._set_current(full, version)
        elif engines:
            self.writer.on_loaded()
        return {engine.url for engine, error in zip(engines, errors, strict=True) if error is None}

    async def update(self, url: str) -> int:
        """Load the current version on a new engine; returns the version.

        Raises EngineError, and IncompatibleEngineError if its tokens cannot be trained on.
        """
        weights, version = await self.files()
        async with aiohttp.ClientSession() as http:
            engine = EngineControl(url, http)
            await self.samples.of(engine)
            await self._read(engine, weights, version)
        self.unavailable.discard(url)
        return version

    async def resync(self, url: str) -> bool:
        """Load the current version on a restarted engine; returns whether it has it now.

        An unresponsive engine may be retried later; one that refuses is taken out of service until a publish
        updates it.
        """
        async with self._update_lock, aiohttp.ClientSession() as http:
            weights, version = self.current
            engine = EngineControl(url, http)
            label = await engine.probe_label()
            if label == str(version) and url not in self._pending:
                self.unavailable.discard(url)
                return True
            if label is None or url in self.unavailable:
                return False
            await self.files()
            try:
                await self._read(engine, weights, version)
                return True
            except EngineError as error:
                if error.retryable:
                    return False
                self.unavailable.add(url)
                why = str(error)
        await self.quarantine(url, why)
        return False

    def mark_unavailable(self, urls: Iterable[str]) -> None:
        """Take new engines out of service until the next publish, which restores or quarantines each."""
        self.unavailable.update(urls)
        self._pending.update(urls)

    async def _update_in_rounds(
        self,
        http: aiohttp.ClientSession,
        unresponsive: set[str],
        sent: set[str],
        keep_kv_of: int | None = None,
    ) -> tuple[set[str], dict[str, EngineError]]:
        """Load the current version on all responsive engines, and retry those that may yet succeed.

        Each round lists the engines anew, as a restart may move one to another URL.

        Returns:
            URLs of the updated engines, and the errors of the others.
        """
        deadline = time.monotonic() + self.retry_s
        updated = set(sent)
        failed: dict[str, EngineError] = {}
        for attempt in itertools.count(1):
            present = [url for url in self.engines() if url not in unresponsive]
            failed = {url: error for url, error in failed.items() if url in present}
            # An engine out of service is not waited for, unless its policy has no other.
            in_service = {self.serves(url) for url in present if url not in self.unavailable}
            spared = {url for url in self.unavailable if self.serves(url) in in_service}
            final = {url for url, error in failed.items() if not error.retryable or url in spared}
            remaining = [url for url in present if url not in final | updated]
            if self.in_outage():
                deadline = time.monotonic() + self.retry_s
            served, late = set(map(self.serves, updated)), attempt > 1 and time.monotonic() >= deadline
            # A policy without an updated engine is waited for, whatever those of the others did.
            over = {True: attempt > ATTEMPTS_BESIDE_OTHERS, False: late}
            remaining = [url for url in remaining if not over[self.serves(url) in served]]
            if not remaining:
                break
            if attempt > 1:  # an exited engine restarts meanwhile, with the current version
                await asyncio.sleep(backoff_s(attempt - 2, BACKOFF_S, BACKOFF_MAX_S))
            engines = [EngineControl(url, http, keep_kv_of) for url in remaining]
            results = await self._load(engines, *await self.files())
            for url, error in zip(remaining, results, strict=True):
                failed.pop(url, None)
                if error is None:
                    updated.add(url)
                else:
                    failed[url] = error
        return updated, failed

    async def _unresponsive(self, http: aiohttp.ClientSession) -> set[str]:
        """Return the unavailable engines that still do not respond; not a policy's only ones."""
        urls = self.engines()
        unavailable = [url for url in urls if url in self.unavailable]
        labels = await asyncio.gather(*(EngineControl(url, http).probe_label() for url in unavailable))
        away = {url for url, label in zip(unavailable, labels, strict=True) if label is None}
        there = {self.serves(url) for url in urls if url not in away}
        return {url for url in away if self.serves(url) in there}

    async def _load(self, engines: Iterable[EngineControl], weights: Path, version: int) -> Errors:
        return await asyncio.gather(*(error_of(self._read(one, weights, version)) for one in engines))

    async def _read(self, engine: EngineControl, weights: Path, version: int) -> None:
        """Deliver weights to an engine's node and load them. Raises EngineError."""
        try:
            path = await self.deliver(engine.url, weights)
        except (StartError, OSError) as error:
            raise EngineError(
                f"engine {engine.url}: cannot transfer the weights to its node: {error}", retryable=True
            ) from error
        await engine.load(path, version)
