"""The engines of a run at this moment: those that it began with, and those that join and leave.

The gateway keeps the list, as everybody can change it there. What somebody adds waits, without a call, until
it is brought to the live version and admitted here; what somebody removes gets no more calls and no more
versions. So no call reaches an engine whose weights nobody vouches for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from tidegate.errors import EngineError, GatewayError, UnfitEngineError, unwrapped
from tidegate.gateway.client import GatewayClient

if TYPE_CHECKING:
    from tidegate.trainer.publish.publisher import Publisher

LOOK_S = 2.0


class EngineMembership:
    """Owns which engines are brought to every version, and tells the gateway which of them serve.

    An engine is one URL; behind a router's there are several addresses that take control calls.
    """

    def __init__(self, gateway: GatewayClient, note: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._note = note
        self.on_look: Callable[[bool], None] = lambda serving: None
        """Told with every look whether any engine serves."""
        self._members: dict[str, tuple[str, ...]] = {}
        """Their control addresses, by URL."""
        self._joining: set[str] = set()
        """Members that were brought to a version, and have not served yet."""
        self._trial: set[str] = set()
        """Members that the next publish has to bring to its version, or they are refused."""
        self._work: dict[str, asyncio.Task[None]] = {}
        """What is under way with an engine, by its URL: one thing at a time."""
        self._listing = asyncio.Lock()
        """The list as it was read is not acted on while it is changed from here."""
        self._telling = asyncio.Lock()
        self._publisher: Publisher | None = None
        self._group: asyncio.TaskGroup | None = None

    def urls(self) -> list[str]:
        """Where control calls go."""
        return [address for control in self._members.values() for address in control]

    async def open(self, urls: Sequence[str]) -> None:
        """Begin with these, which are at the live version.

        Those of the run's last start are forgotten, which the gateway's journal remembers; those that joined
        it wait to be brought to what is live now.
        """
        own = [url.rstrip("/") for url in urls]
        for row in await self._gateway.list_engines():
            if row["url"] in own:
                continue
            if row["joined"]:
                await self._gateway.admit_engine(row["url"], False)
            else:
                await self._gateway.remove_engine(row["url"])
        for url in own:
            self._members[url] = (url,)
            await self._gateway.add_engine(url, admitted=True)

    def lead(self, publisher: Publisher) -> None:
        """From now on there are versions to bring engines to."""
        self._publisher = publisher

    # -- what the publisher and the owners of engines tell

    async def hold(self, address: str, why: str) -> None:
        """One that could not be brought to the version gets no calls."""
        url = self._url_of(address)
        if url is None:
            return
        if url in self._trial:
            await self._refuse(url, why)
        else:
            self._note(f"engine {url} is out of service: {why}")
            await self._tell(url)

    async def restore(self, address: str) -> None:
        """One that was out of service is at the live version."""
        url = self._url_of(address)
        if url is None:
            return
        how = "joined" if url in self._trial else "is in service again"
        if await self._tell(url):
            self._trial.discard(url)
            self._note(f"engine {url} {how}, at version {self._lead.live[1]}")

    async def returned(self, before: str, url: str) -> None:
        """An engine that was at `before` was started again by its owner, maybe elsewhere."""
        if before not in self._members:
            return  # it left meanwhile
        if url != before:
            async with self._listing:
                await self._gateway.add_engine(url, admitted=self._publisher is None)
                self._members[url] = (url,)
                del self._members[before]
                await self._gateway.remove_engine(before)
        if self._group is not None:  # not here: it may wait for a publish that waits for this engine
            self._start(self._group, url, self._refresh(url))

    # -- what others do to the list

    async def watch(self) -> None:
        """Follow the gateway's list for ever: bring in who joins, let go who leaves."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    try:
                        await self._look(group)
                    except GatewayError as error:  # its owner starts it again, or ends the run
                        self._note(f"the engines cannot be listed: {error}")
                    await asyncio.sleep(LOOK_S)
        except ExceptionGroup as failures:
            raise unwrapped(failures) from None
        finally:
            self._group = None

    async def _look(self, group: asyncio.TaskGroup) -> None:
        async with self._listing:
            rows = {row["url"]: row for row in await self._gateway.list_engines()}
            self.on_look(any(row["healthy"] and row["admitted"] for row in rows.values()))
            for url in self._members.keys() - rows.keys():
                del self._members[url]
                self._trial.discard(url)
                self._joining.discard(url)
                self._note(f"engine {url} left")
            for url in self._work.keys() - rows.keys():
                self._work.pop(url).cancel()
            live = str(self._lead.live[1])
            for url, row in rows.items():
                if url not in self._members:
                    self._start(group, url, self._join(url, tuple(row["control"])))
                elif row["healthy"] and not (row["admitted"] and row["weight_version"] == live):
                    self._start(group, url, self._refresh(url))

    def _start(self, group: asyncio.TaskGroup, url: str, work: Coroutine[Any, Any, None]) -> None:
        if url in self._work:
            work.close()
            return
        task = self._work[url] = group.create_task(self._noted(url, work), name=f"engine {url}")
        task.add_done_callback(lambda done: self._work.get(url) is done and self._work.pop(url))

    async def _noted(self, url: str, work: Coroutine[Any, Any, None]) -> None:
        """What the gateway could not be told now it is told after another look."""
        try:
            await work
        except GatewayError as error:
            self._note(f"engine {url}: {error}")

    async def _join(self, url: str, control: tuple[str, ...]) -> None:
        """Bring a newcomer to what is live, which may change meanwhile; then it is one of them."""
        publisher = self._lead
        self._note(f"engine {url} joins")
        deadline = time.monotonic() + publisher.patience_s
        while True:
            try:
                brought = {await publisher.bring(address) for address in control}
            except UnfitEngineError as error:
                await self._refuse(url, str(error))
                return
            except EngineError as error:
                if error.retryable and time.monotonic() < deadline:
                    await asyncio.sleep(LOOK_S)
                    continue
                await self._not_by_files(url, control, error)
                return
            if brought == {publisher.live[1]}:
                break
        self._members[url] = control  # with no wait in between: the next publish is for it too
        self._joining.add(url)
        await self._tell(url)

    async def _not_by_files(self, url: str, control: tuple[str, ...], error: EngineError) -> None:
        """One that cannot read the weights may be one that they can be sent to."""
        if self._lead.sender is None:
            await self._refuse(url, str(error))
            return
        self._note(f"engine {url} is sent the weights at the next publish: {error}")
        self._trial.add(url)
        self._members[url] = control
        self._lead.expect(control)

    async def _refresh(self, url: str) -> None:
        """A member that came back, or attests another version than the live one."""
        if all([await self._lead.refresh(address) for address in self._members.get(url, ())]):
            await self._tell(url)

    async def _tell(self, url: str) -> bool:
        """Tell the gateway whether an engine serves: it does if nothing of it is out of service and it
        attests the live version, for it may have been started again since it was brought to it."""
        async with self._telling:
            control = self._members.get(url, ())
            serves = (
                bool(control) and self._lead.out.isdisjoint(control) and await self._lead.attested(control)
            )
            try:
                await self._gateway.admit_engine(url, serves)
            except GatewayError as error:
                if error.status != 404:  # it was removed meanwhile
                    raise
                return False
        if serves and url in self._joining:
            self._joining.discard(url)
            self._note(f"engine {url} joined, at version {self._lead.live[1]}")
        return serves

    async def _refuse(self, url: str, why: str) -> None:
        self._members.pop(url, None)
        self._trial.discard(url)
        self._joining.discard(url)
        self._note(f"engine {url} is refused: {why}")
        await self._gateway.remove_engine(url)

    def _url_of(self, address: str) -> str | None:
        return next((url for url, control in self._members.items() if address in control), None)

    @property
    def _lead(self) -> Publisher:
        assert self._publisher is not None, "nobody publishes yet"
        return self._publisher
