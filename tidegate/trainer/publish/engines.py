"""Tracks the engines of a run: the initial ones, and those that join and leave.

The gateway keeps the list, which others can change there. An added engine gets no calls until it has loaded
the current version and is enabled here; a removed engine gets no more calls and no more versions. So no call
reaches an engine with unknown weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidegate.errors import EngineError, GatewayError, IncompatibleEngineError, unwrapped
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.publish.engine_control import labels_of

if TYPE_CHECKING:
    from tidegate.trainer.publish.publisher import Publisher

POLL_S = 2.0


class EngineMembership:
    """Decides which engines every version is published to, and enables and disables them at the gateway.

    An engine has one URL; a router's engine has several addresses for control calls.
    """

    def __init__(self, gateway: GatewayClient, note: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._note = note
        self.on_poll: Callable[[Collection[str], float], None] = lambda unserved, rate: None
        """Called with every poll, with the policies that no engine serves, and tokens per second. The name ""
        stands for all policies: no engine serves."""
        self._members: dict[str, tuple[str, ...]] = {}
        """Control addresses by URL."""
        self._sets: dict[str, str] = {}
        """Name of the policy or the policies that an engine of the run serves, by URL."""
        self._frozen: frozenset[str] = frozenset()
        self._joining: set[str] = set()
        """Members that have loaded a version but have not been enabled yet."""
        self.reserved: set[str] = set()
        """Members that serve a candidate version, and not the current one."""
        self.pinned: set[str] = set()
        """Reserved members that get no publish, so that an evaluation samples from one version."""
        self._provisional: set[str] = set()
        """Members that are rejected unless the next publish can update them."""
        self._work: dict[str, asyncio.Task[None]] = {}
        """The running operation of each engine, by URL."""
        self._list_lock = asyncio.Lock()
        """Held while the list is read and acted on, or changed here."""
        self._enable_lock = asyncio.Lock()
        self.publisher: Publisher | None = None
        """Set it before `watch`."""
        self._group: asyncio.TaskGroup | None = None

    def urls(self) -> list[str]:
        """Return the control addresses of the engines that versions are published to."""
        # A load would pause the engines of a frozen policy for weights that they have.
        without = self.pinned | {url for url, name in self._sets.items() if name in self._frozen}
        members = self._members.items()
        return [address for url, control in members if url not in without for address in control]

    async def open(
        self, urls: Sequence[str], serves: Sequence[str] = (), frozen: Collection[str] = ()
    ) -> None:
        """Add the initial engines, which have the current version.

        `serves` names the policy of each, or of several the first one; by default the run has one policy.
        Those that serve one of the `frozen` policies are published nothing, as nothing changes.

        Of the engines in the gateway's journal, those of the run's last start are removed, and those that had
        joined are disabled until they have loaded the current version.
        """
        # The gateway lists them without the slash.
        own = dict(zip((url.rstrip("/") for url in urls), serves or [""] * len(urls), strict=True))
        rows = await self._gateway.list_engines()
        if any(row.get("candidate") for row in rows):  # of a trainer that was killed
            await self._gateway.set_candidate([])
        for row in rows:
            if row["url"] in own:
                continue
            if row["joined"]:
                await self._gateway.admit_engine(row["url"], False)
            else:
                await self._gateway.remove_engine(row["url"])
        self._frozen = frozenset(frozen)
        for url, name in own.items():
            self._members[url] = (url,)
            self._sets[url] = name
            await self._gateway.add_engine(url, admitted=True, policy=name)

    def serves(self, address: str) -> str:
        """Return the name of the policy or the policies that the engine at an address serves."""
        return self._sets.get(self._url_of(address) or address, "")

    def control(self, url: str) -> tuple[str, ...]:
        """Return the control addresses of a member; none if it has left."""
        return self._members.get(url, ())

    async def release(self) -> None:
        """Return the reserved engines to service, with the current version."""
        urls = list(self.reserved)
        self.reserved.clear()
        for url in urls:
            await self._resync(url)

    # -- callbacks of the publisher and of the engines' owners

    async def mark_unavailable(self, address: str, why: str) -> None:
        """Disable an engine that could not be updated."""
        url = self._url_of(address)
        if url is None:
            return
        if url in self._provisional:
            await self._reject(url, why)
        else:
            self._note(f"engine {url} is out of service: {why}")
            await self._set_enabled(url)

    async def announce(self, address: str) -> None:
        """Have the gateway read the version of an engine that has loaded another adapter."""
        if (url := self._url_of(address)) is not None:
            await self._set_enabled(url)

    async def restore(self, address: str) -> None:
        """Enable an engine again that has loaded the current version."""
        url = self._url_of(address)
        if url is None:
            return
        how = "joined" if url in self._provisional else "is in service again"
        if await self._set_enabled(url):
            self._provisional.discard(url)
            self._note(f"engine {url} {how}, at version {self._active_publisher.current[1]}")

    async def on_restart(self, old_url: str, url: str) -> None:
        """Handle the restart of an engine by its owner, possibly at another URL."""
        if old_url not in self._members:
            return  # it has left
        if url != old_url:
            async with self._list_lock:
                name = self._sets[url] = self._sets.pop(old_url)
                await self._gateway.add_engine(url, admitted=self.publisher is None, policy=name)
                self._members[url] = (url,)
                del self._members[old_url]
                if old_url in self.reserved:
                    # The engine stays reserved under its new URL: the test of a candidate goes on with it.
                    self.reserved ^= {old_url, url}
                await self._gateway.remove_engine(old_url)
        if self._group is not None:  # as a task: it may wait for a publish that waits for this engine
            self._start(self._group, url, self._resync(url))

    # -- changes to the gateway's list

    async def watch(self) -> None:
        """Poll the gateway's list until cancelled and handle engines that join or leave."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    try:
                        await self._poll(group)
                    except GatewayError as error:  # its owner restarts it or ends the run
                        self._note(f"the engines cannot be listed: {error}")
                    await asyncio.sleep(POLL_S)
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None
        finally:
            self._group = None

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        async with self._list_lock:
            rows = {row["url"]: row for row in await self._gateway.list_engines()}
            serving = [row for row in rows.values() if row["healthy"] and row["admitted"]]
            served = {row.get("policy", "") for row in serving}
            unserved = {*self._sets.values()} - served if serving else {""}
            self.on_poll(unserved, sum(row.get("tokens_per_s", 0.0) for row in serving))
            for url in self._members.keys() - rows.keys():
                del self._members[url]
                self.reserved.discard(url)
                self._provisional.discard(url)
                self._joining.discard(url)
                self._note(f"engine {url} left")
            for url in self._work.keys() - rows.keys():
                self._work.pop(url).cancel()
            current = str(self._active_publisher.current[1])
            for url, row in rows.items():
                if url not in self._members:
                    self._sets |= dict.fromkeys((url, *row["control"]), row.get("policy", ""))
                    self._start(group, url, self._join(url, tuple(row["control"])))
                elif url in self.reserved:
                    continue
                elif row["healthy"] and not (row["admitted"] and self._is_current(url, row, current)):
                    self._start(group, url, self._resync(url))

    def _is_current(self, url: str, row: Mapping[str, Any], current: str) -> bool:
        return row["weight_version"] == current or self._sets.get(url) in self._frozen

    def _start(self, group: asyncio.TaskGroup, url: str, work: Coroutine[Any, Any, None]) -> None:
        if url in self._work:
            # Python warns of a coroutine that is neither awaited nor closed.
            work.close()
            return
        task = self._work[url] = group.create_task(self._run_logged(url, work), name=f"engine {url}")
        # Only its own entry: an engine that left and joined again may have a newer task.
        task.add_done_callback(lambda done: self._work.get(url) is done and self._work.pop(url))

    async def _run_logged(self, url: str, work: Coroutine[Any, Any, None]) -> None:
        """Await work; log a failed gateway call, which a later poll repeats."""
        try:
            await work
        except GatewayError as error:
            self._note(f"engine {url}: {error}")

    async def _join(self, url: str, control: tuple[str, ...]) -> None:
        """Load the current version, which may change meanwhile, on a new engine; then make it a member."""
        publisher = self._active_publisher
        self._note(f"engine {url} joins")
        deadline = time.monotonic() + publisher.retry_s
        while True:
            try:
                versions = {await publisher.update(address) for address in control}
            except IncompatibleEngineError as error:
                await self._reject(url, str(error))
                return
            except EngineError as error:
                if error.retryable and time.monotonic() < deadline:
                    await asyncio.sleep(POLL_S)
                    continue
                await self._join_by_broadcast(url, control, error)
                return
            if versions == {publisher.current[1]}:
                break
        self._members[url] = control  # without an await since: the next publish includes it
        self._joining.add(url)
        await self._set_enabled(url)

    async def _join_by_broadcast(self, url: str, control: tuple[str, ...], error: EngineError) -> None:
        """Let the next publish send the weights to an engine that cannot load files."""
        if self._active_publisher.sender is None:
            await self._reject(url, str(error))
            return
        self._note(f"engine {url} will receive the weights at the next publish: {error}")
        self._provisional.add(url)
        self._members[url] = control
        self._active_publisher.mark_unavailable(control)

    async def _resync(self, url: str) -> None:
        """Update a member that has restarted or reports another version, then enable it."""
        if url in self.reserved:
            return
        # A list, as `all` would stop at the first address that fails and leave the next ones without the
        # version.
        if all([await self._active_publisher.resync(address) for address in self._members.get(url, ())]):
            await self._set_enabled(url)

    async def _set_enabled(self, url: str) -> bool:
        """Enable or disable an engine at the gateway; returns whether it is enabled.

        It is enabled if all its addresses are in service and report the current version, which a restart
        since the last update would have changed.
        """
        # One decision at a time: of two that overlap, the older one could reach the gateway last.
        async with self._enable_lock:
            control = self._members.get(url, ())
            serves = (
                bool(control)
                and url not in self.reserved
                and self._active_publisher.unavailable.isdisjoint(control)
                and await labels_of(control) == {str(self._active_publisher.current[1])}
            )
            try:
                await self._gateway.admit_engine(url, serves)
            except GatewayError as error:
                if error.status != 404:  # 404: it has been removed
                    raise
                return False
        if serves and url in self._joining:
            self._joining.discard(url)
            self._note(f"engine {url} joined, at version {self._active_publisher.current[1]}")
        return serves

    async def _reject(self, url: str, why: str) -> None:
        self._members.pop(url, None)
        self._provisional.discard(url)
        self._joining.discard(url)
        self._note(f"engine {url} is rejected: {why}")
        await self._gateway.remove_engine(url)

    def _url_of(self, address: str) -> str | None:
        return next((url for url, control in self._members.items() if address in control), None)

    @property
    def _active_publisher(self) -> Publisher:
        assert self.publisher is not None, "the publisher is not set"
        return self.publisher
