"""Groups, versions and committed steps for a training loop of your own (docs/own_loop.md)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp

from tidegate import failpoints
from tidegate.errors import CheckpointError, ConfigError, EngineError, TrainingError
from tidegate.gateway.client import GatewayClient
from tidegate.service.backoff import backoff_s
from tidegate.service.directory_lock import DirectoryLock
from tidegate.trainer.batch.rows import is_trained
from tidegate.trainer.checkpoint.checkpoint import sync_tree
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.jsonl import sync
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.trainer.waits import run_to_completion
from tidegate.types import Group

WAIT_S = 5.0
"""Seconds that a lease waits for a group; between leases the engines' versions are checked."""
PUBLISH_S = 120.0
"""Seconds for which an engine that cannot be reached is called again."""
T = TypeVar("T")
LEASE = 64
"""Groups of one lease at the start."""
KEPT = 2
"""Newest steps whose files are kept: engines may still load the one before the newest."""


def rewards_differ(group: Group) -> bool:
    """Whether a group has rewards to compare for a policy, and tokens of this policy to train on."""
    trained = {turn.policy for one in group.trajectories for turn in one.turns if is_trained(turn)}
    return any(len({one.reward_of(policy) for one in group.trajectories}) > 1 for policy in trained)


class OwnTrainer:
    """Leases groups for a training loop of your own, and commits each of its steps exactly once.

    Use it with `async with`: on entry it takes over from the loop that ran before, and has the engines load
    the weights of the newest committed step. A loop that is killed at any moment repeats at most the step
    that it had not committed; no group is lost, and none is in two committed steps of the directory.

    Args:
        url: Address of a gateway that no other trainer manages.
        engines: Addresses of its engines.
        directory: Directory of the steps; one loop at a time uses it.
        max_staleness: Bound in versions, between a group's oldest token and the batch.
        admin_key: The gateway's admin key, if it has one.

    Attributes:
        step: Committed steps.
        version: Version that the engines have.
        checkpoint: Directory of the newest committed step; None before the first one.

    Raises:
        StartError: Another process uses the directory.
        CheckpointError: A committed step cannot be read.
        ConfigError: Before the first step, the engines have different weights.
        EngineError: An engine cannot be reached for PUBLISH_S, or refuses the weights.
        GatewayError: The gateway cannot be reached, a newer loop has taken over (status 410), or it speaks
            another version of the protocol (400).
    """

    def __init__(
        self,
        url: str,
        engines: Sequence[str],
        directory: Path,
        *,
        max_staleness: int = 2,
        admin_key: str | None = None,
    ) -> None:
        self.step = self.version = self._epoch = 0
        self.checkpoint: Path | None = None
        self.max_staleness = max_staleness
        self._directory = directory
        self._committed: list[str] = []
        """Groups of committed steps whose leases may not have been ended."""
        self._leased: list[Group] = []
        self._stack = contextlib.AsyncExitStack()
        self._gateway = GatewayClient(url, admin_key)
        self._urls = list(engines)
        self._engines: list[EngineControl] = []

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            stack.enter_context(await asyncio.to_thread(DirectoryLock, self._directory, "an own loop"))
            await asyncio.to_thread(self._resume)
            await stack.enter_async_context(self._gateway)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            self._engines = [EngineControl(url, http) for url in self._urls]
            if self.checkpoint is None:
                self.version = await self._first_version()
            await self._gateway.begin_epoch(self._epoch)
            for engine in self._engines:
                await self._load(engine, again=self.checkpoint is not None)  # another loop may have led it
                await engine.try_resume()  # a loop that was killed may have left it paused
            for url in self._urls:
                await self._gateway.add_engine(url)
            # All that are ready: among them are those of committed steps whose ends were lost.
            while groups := await self._gateway.lease(self._epoch, LEASE, 0.0):
                self._leased += await self._not_committed(groups)
            self._committed = []
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def batch(self, number: int, wanted: Callable[[Group], bool] = rewards_differ) -> list[Group]:
        """Waits for groups to train on, however long.

        Args:
            number: How many.
            wanted: Whether to train on a group; another one ends as `filtered`.

        Returns:
            The groups, each within the bound.
        """
        groups: list[Group] = []
        try:
            while len(groups) < number:
                await self._lead()
                await self._publish()  # to an engine that was restarted meanwhile
                missing = number - len(groups)
                if not self._leased:
                    leased = await self._gateway.lease(self._epoch, missing, WAIT_S)
                    self._leased = await self._not_committed(leased)
                for group in self._leased[:missing]:
                    if (why := self._too_old(group)) is not None:
                        await self._end(group, State.STALE, why)
                    elif not wanted(group):
                        await self._end(group, State.FILTERED, "the loop did not want it")
                    else:
                        groups.append(group)
                    del self._leased[0]
        except BaseException:
            self._leased = groups + self._leased  # for the next batch
            raise
        return groups

    async def commit(self, groups: Sequence[Group], save: Callable[[Path], object]) -> None:
        """Commits a step, ends its groups, and has the engines load its weights as the next version.

        Args:
            groups: The batch.
            save: Writes into a new directory: the weights, in Hugging Face's format, into its subdirectory
                `model`, and whatever else the loop needs to go on. It is called in a thread.
        """
        # A batch that was leased before another commit may have become too old since.
        if old := [group.id for group in groups if self._too_old(group)]:
            raise TrainingError(
                f"groups {', '.join(old)} are beyond the bound of {self.max_staleness} versions: commit a "
                "batch before you wait for the next one"
            )
        # Before the step is written: if another loop has taken over, it has leased these groups.
        await self._lead()
        await run_to_completion(self._commit(groups, save))
        for group in groups:
            await self._end(group, State.STEPPED, f"step {self.step}")
            self._committed.remove(group.id)
            failpoints.reach("own.ended")
        failpoints.reach("own.acknowledged")
        await self._publish()
        await asyncio.to_thread(self._prune)

    async def _commit(self, groups: Sequence[Group], save: Callable[[Path], object]) -> None:
        ids = [*self._committed, *(group.id for group in groups)]
        step, version = self.step + 1, self.version + 1
        record = {"step": step, "version": version, "epoch": self._epoch, "groups": ids}
        self.checkpoint = await asyncio.to_thread(self._write, record, save)
        self.step, self.version, self._committed = step, version, ids

    async def _lead(self) -> None:
        """Raises GatewayError (410) if another loop has taken over."""
        await self._gateway.begin_epoch(self._epoch)

    async def _not_committed(self, leased: Sequence[Group]) -> list[Group]:
        """End the groups of committed steps; returns the others."""
        groups = []
        for group in leased:
            if group.id in self._committed:
                await self._end(group, State.STEPPED, f"step {self.step}")
                self._committed.remove(group.id)
            else:
                groups.append(group)
        return groups

    def _too_old(self, group: Group) -> str | None:
        oldest, newest = group.oldest_version(), group.newest_version()
        if oldest is None or newest is None:
            return "the version of some of its tokens is unknown"
        if newest > self.version:
            return f"it has tokens of version {newest}, which another trainer published after {self.version}"
        if self.version - oldest > self.max_staleness:
            age = self.version - oldest
            return f"its oldest token is {age} versions old, the bound is {self.max_staleness}"
        return None

    async def _end(self, group: Group, state: State, why: str) -> None:
        await self._gateway.ack(self._epoch, group.lease_id, state, why)

    async def _first_version(self) -> int:
        versions = [await _retried(engine.version) for engine in self._engines]
        if len(set(versions)) != 1:
            raise ConfigError(
                f"the engines {', '.join(self._urls)} have the versions {versions} before the first step: "
                "start them with the same weights and version"
            )
        return versions[0]

    async def _publish(self) -> None:
        """Have every engine with another version load the newest step's weights."""
        await asyncio.gather(*map(self._load, self._engines))

    async def _load(self, engine: EngineControl, *, again: bool = False) -> None:
        if await _retried(engine.version) == self.version and not again:
            return
        if self.checkpoint is None:
            raise EngineError(f"engine {engine.url} has other weights than before the first step")
        weights = (self.checkpoint / "model").absolute()
        await _retried(partial(engine.load, weights, self.version))

    # -- files ---------------------------------------------------------------------------------------

    def _steps(self) -> list[Path]:
        """Directories of the committed steps, in order."""
        return sorted(self._directory.glob("step_*"), key=lambda path: (len(path.name), path.name))

    def _resume(self) -> None:
        """Read the newest committed step; the epoch is higher than that of any loop before."""
        for left in self._directory.glob(".step_*"):  # of a loop that was killed
            shutil.rmtree(left)
        last = 0
        if steps := self._steps():
            file = steps[-1] / "step.json"
            try:
                record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                self.step, self.version = record["step"], record["version"]
                self._committed, last = record["groups"], record["epoch"]
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{file} cannot be read ({error!r}): remove {steps[-1]} to go on from the step before"
                ) from None
            self.checkpoint = steps[-1]
        # Not the number of starts: two loops with directories of their own may follow each other.
        self._epoch = max(int(time.time() * 1000), last + 1)

    def _write(self, record: dict[str, Any], save: Callable[[Path], object]) -> Path:
        """Write a step's directory; its rename, after all files are on disk, is the commit."""
        name = f"step_{record['step']:06d}"
        written, path = self._directory / f".{name}", self._directory / name
        shutil.rmtree(written, ignore_errors=True)  # of a try that failed
        written.mkdir()
        save(written)
        if not (written / "model").is_dir():
            raise CheckpointError(f"`save` wrote no directory {written / 'model'}: engines load it")
        (written / "step.json").write_text(json.dumps(record), encoding="utf-8")
        sync_tree(written)
        with failpoints.around("own.commit"):
            written.rename(path)
        sync(self._directory)
        return path

    def _prune(self) -> None:
        for path in self._steps()[:-KEPT]:
            shutil.rmtree(path)


async def _retried(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an engine's call for PUBLISH_S while it cannot be reached: it may be starting."""
    deadline = time.monotonic() + PUBLISH_S
    for failures in itertools.count():
        try:
            return await call()
        except EngineError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(backoff_s(failures, 0.2, 5.0))
    raise AssertionError
