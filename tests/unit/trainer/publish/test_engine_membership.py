"""Engines that join a run get the live weights before they serve; engines that leave are released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidegate.errors import EngineError, GatewayError, IncompatibleEngineError
from tidegate.trainer.publish import engine_control
from tidegate.trainer.publish import engines as engines_module
from tidegate.trainer.publish import publisher as publish
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.publish.version_writer import VersionWriter


@dataclass
class Machine:
    """One engine; `fault` is what its loads raise, and none ends before `loads_on` is set; `unfit` is what
    is wrong with its tokens."""

    label: str
    alive: bool = True
    fault: EngineError | None = None
    unfit: EngineError | None = None
    loads_on: asyncio.Event | None = None
    loads: list[int] = field(default_factory=list)


@dataclass
class World:
    """Engines, and the gateway's list of them, which checks who is admitted.

    It does what the gateway does: who joins waits, who comes back with another label waits.
    """

    machines: dict[str, Machine] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    publishing: bool = False

    def __post_init__(self) -> None:
        self.engines = EngineMembership(self, self.notes.append)  # type: ignore[arg-type]
        self.publisher = Publisher(
            writer=VersionWriter(directory=Path("/nowhere"), save_weights=lambda place, dtype: None),
            engines=self.engines.urls, cancel_stale=_nothing,
            quarantine=self.engines.mark_unavailable, restore=self.engines.restore,
            current=(Path("/nowhere/v0"), 0), retry_s=60.0,
        )  # fmt: skip
        self.engines.publisher = self.publisher

    # -- the gateway's client

    async def list_engines(self) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        told = [
            {**row, "healthy": self.machines[url].alive, "weight_version": row["seen"]}
            for url, row in self.rows.items()
        ]
        for url, row in self.rows.items():
            row["seen"] = self.machines[url].label  # a probe sees it later
        await asyncio.sleep(0)
        return told

    async def add_engine(self, url: str, admitted: bool | None = None, policy: str = "") -> None:
        await asyncio.sleep(0)
        known = {"url": url, "control": [url], "joined": admitted is None, "seen": None, "admitted": False}
        known["policy"] = policy
        row = self.rows.setdefault(url, known)
        if admitted is not None:
            self._admit(row, admitted)

    async def admit_engine(self, url: str, admitted: bool) -> None:
        await asyncio.sleep(0)
        if url not in self.rows:
            raise GatewayError("there is no such engine", status=404)
        self._admit(self.rows[url], admitted)

    async def remove_engine(self, url: str) -> None:
        await asyncio.sleep(0)
        self.rows.pop(url, None)

    def _admit(self, row: dict[str, Any], admitted: bool) -> None:
        row["admitted"] = admitted
        self.check()

    # -- what happens

    def check(self) -> None:
        """No call reaches an engine whose version is not live; a publish changes all of them over."""
        live = self.publisher.current[1]
        for url, row in self.rows.items():
            if row["admitted"] and self.machines[url].alive:
                label = self.machines[url].label
                assert label == str(live) or (self.publishing and label == str(live - 1)), (url, label, live)

    async def join(self, url: str, label: str = "default") -> None:
        self.machines.setdefault(url, Machine(label))
        await self.add_engine(url)

    async def started(self) -> None:
        """A process starts, which takes longer than to look at an engine and tell the gateway of it."""
        await self.until(lambda: not self.engines._enable_lock.locked())

    async def back(self, url: str, label: str) -> None:
        await self.started()
        machine = self.machines[url]
        machine.alive = True
        if machine.label != label and url in self.rows:
            self.rows[url]["admitted"] = False
        machine.label = label

    async def publish(self) -> None:
        self.publishing = True
        await self.publisher.publish(self.publisher.current[1] + 1)
        self.publishing = False
        self.check()

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110 - any of many states may make it true
                await asyncio.sleep(0)

    def serves(self, url: str) -> bool:
        return bool(self.rows[url]["admitted"]) and self.machines[url].label == str(self.publisher.current[1])


class Control:
    """Takes the place of the control calls over HTTP."""

    world: World

    def __init__(self, url: str, *_: object) -> None:
        self.url = url
        self.machine = self.world.machines[url]

    async def probe_label(self) -> str | None:
        await asyncio.sleep(0)
        return self.machine.label if self.machine.alive else None

    async def check_sample(self, listed_ids: int = 0, **_: bool) -> None:
        await asyncio.sleep(0)
        if self.machine.unfit is not None:
            raise self.machine.unfit

    async def load(self, _: Path, version: int) -> None:
        for _step in range(3):
            if not self.machine.alive:
                raise EngineError("nobody there", retryable=True)
            await asyncio.sleep(0)
        if self.machine.loads_on is not None:
            await self.machine.loads_on.wait()
        if self.machine.fault is not None:
            raise self.machine.fault
        self.machine.loads.append(version)
        self.machine.label = str(version)
        self.world.check()


async def _nothing(_: int) -> None:
    return


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[World]:
    """A run with the engine `own`, whose list is watched; it must not have failed in the end."""
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines_module, "POLL_S", 0.0)
        patch.setattr(publish, "BACKOFF_S", 0.0)
        for module in (publish, engine_control):
            patch.setattr(module, "EngineControl", Control)
        patch.setattr(Control, "world", world, raising=False)
        world.machines["own"] = Machine("0")
        await world.engines.open(["own"])
        watching = asyncio.create_task(world.engines.watch())
        yield world
        assert not watching.done(), watching.exception()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_joining_engine_gets_the_live_version_and_each_later_one() -> None:
    async with running() as world:
        await world.publish()
        await world.join("new", label="1")  # the label proves nothing: nobody knows its weights
        await world.until(lambda: world.serves("new"))
        assert world.machines["new"].loads == [1]
        await world.publish()
        assert world.machines["new"].loads == [1, 2]
        assert world.notes[-1] == "engine new joined, at version 1"


async def test_a_joining_engine_gets_the_weights_of_its_policy() -> None:
    async with running() as world:
        served: list[str] = []

        async def deliver(url: str, weights: Path) -> Path:
            served.append(world.engines.serves(url))
            return weights

        world.publisher.deliver = deliver
        world.machines["new"] = Machine("default")
        await world.add_engine("new", policy="verifier")
        await world.until(lambda: world.serves("new"))
        assert (served, world.engines.serves("new")) == (["verifier"], "verifier")


async def test_a_version_that_became_live_meanwhile_is_loaded_before_it_serves() -> None:
    async with running() as world:
        loads_on = asyncio.Event()
        world.machines["new"] = Machine("default", loads_on=loads_on)
        await world.join("new")
        await world.until(lambda: "engine new joins" in world.notes)
        await world.publish()
        loads_on.set()
        await world.until(lambda: world.serves("new"))
        assert world.machines["new"].loads == [0, 1]


async def test_an_engine_that_left_gets_no_versions_and_may_join_again() -> None:
    async with running() as world:
        await world.join("new")
        await world.until(lambda: world.serves("new"))
        await world.remove_engine("new")
        await world.until(lambda: world.engines.urls() == ["own"])
        await world.publish()
        assert world.machines["new"].loads == [0]
        assert "engine new left" in world.notes
        await world.join("new")
        await world.until(lambda: world.serves("new"))
        assert world.machines["new"].loads == [0, 1]


async def test_a_pinned_engine_keeps_its_version_until_it_is_released() -> None:
    async with running() as world:
        await world.join("new")
        await world.until(lambda: world.serves("new"))
        world.engines.reserved.add("new")
        world.engines.pinned.add("new")
        await world.admit_engine("new", False)
        await world.publish()
        await world.publish()
        assert world.machines["new"].loads == [0]
        world.engines.pinned.clear()
        await world.engines.release()
        await world.until(lambda: world.serves("new"))
        assert world.machines["new"].loads == [0, 2]


async def test_an_engine_that_refuses_the_weights_is_refused_with_its_reason() -> None:
    async with running() as world:
        world.machines["new"] = Machine("default", fault=EngineError("its model is another one"))
        await world.join("new")
        await world.until(lambda: "new" not in world.rows)
        assert "engine new is rejected: its model is another one" in world.notes
        assert world.engines.urls() == ["own"]


@pytest.mark.parametrize("sends", [False, True])
async def test_an_engine_whose_tokens_could_not_be_trained_on_is_refused(sends: bool) -> None:
    async with running() as world:
        world.publisher.sender = object() if sends else None  # type: ignore[assignment]
        world.machines["old"] = Machine(
            "default", unfit=IncompatibleEngineError("a token comes without its version")
        )
        await world.join("old")
        await world.until(lambda: "old" not in world.rows)
        assert "engine old is rejected: a token comes without its version" in world.notes
        assert world.machines["old"].loads == []
        assert world.engines.urls() == ["own"]


async def test_an_engine_that_has_not_started_is_retried_until_a_limit() -> None:
    async with running() as world:
        world.machines["new"] = Machine("default", alive=False)
        await world.join("new")
        await world.until(lambda: "engine new joins" in world.notes)
        world.machines["new"].alive = True
        await world.until(lambda: world.serves("new"))
        world.publisher.retry_s = 0.0
        world.machines["never"] = Machine("default", alive=False)
        await world.join("never")
        await world.until(lambda: "engine never is rejected: nobody there" in world.notes)


async def test_an_engine_that_cannot_read_the_weights_is_sent_them_at_the_next_publish() -> None:
    class Sends:
        takes: frozenset[str] = frozenset({"own"})

        def retain(self, urls: object) -> None: ...

        async def send(self, engines: list[Control], version: int, keep: object) -> set[str]:
            for engine in engines:
                if engine.url in self.takes:
                    engine.machine.label = str(version)
            return set(self.takes)

    sends = Sends()
    async with running() as world:
        world.publisher.sender = sends  # type: ignore[assignment]
        for url in ("remote", "other"):
            world.machines[url] = Machine("0", fault=EngineError("no such file"))  # as live is by chance
            await world.join(url)
        await world.until(lambda: {"remote", "other"} <= set(world.engines.urls()))
        for _ in range(50):
            await asyncio.sleep(0)  # looks at what it says of itself, which proves nothing
        assert not world.rows["remote"]["admitted"]
        sends.takes = frozenset({"own", "remote"})
        await world.publish()
        await world.until(lambda: world.serves("remote"))
        assert "engine remote joined, at version 1" in world.notes
        assert "other" not in world.rows
        assert "engine other is rejected: no such file" in world.notes


async def test_an_own_engine_that_comes_back_elsewhere_is_exchanged() -> None:
    async with running() as world:
        world.machines["own"].alive = False
        publishing = asyncio.create_task(world.publish())
        await world.until(lambda: world.publisher.current[1] == 1)
        world.machines["elsewhere"] = Machine("0")
        await world.engines.on_restart("own", "elsewhere")
        await publishing
        await world.until(lambda: world.serves("elsewhere"))
        assert world.rows.keys() == {"elsewhere"}
        assert world.engines.urls() == ["elsewhere"]
        await world.engines.on_restart("own", "nowhere")
        assert world.rows.keys() == {"elsewhere"}, "who left is not brought back"


async def test_an_engine_that_returned_with_older_weights_gets_the_live_ones() -> None:
    async with running() as world:
        await world.join("new")
        await world.until(lambda: world.serves("new"))
        await world.publish()
        world.machines["new"].alive = False
        await world.back("new", "default")
        await world.until(lambda: world.serves("new"))
        assert world.machines["new"].loads == [0, 1, 1]


async def test_an_engine_out_of_service_is_tried_at_the_next_publish() -> None:
    async with running() as world:
        await world.join("new")
        await world.until(lambda: world.serves("new"))
        world.machines["new"].fault = EngineError("no")
        await world.publish()
        assert not world.rows["new"]["admitted"]
        for _ in range(50):
            await asyncio.sleep(0)  # looks, which change nothing
        assert not world.rows["new"]["admitted"]
        world.machines["new"].fault = None
        await world.publish()
        assert world.serves("new")


NAMES = st.sampled_from(["a", "b", "c"])
HAPPENINGS = st.one_of(
    st.tuples(st.sampled_from(["join", "leave", "kill", "back", "refuse"]), NAMES),
    st.tuples(st.just("publish"), st.just("")),
    st.tuples(st.just("tick"), st.integers(1, 12)),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(HAPPENINGS, max_size=25))
@example([("join", "b"), ("tick", 6), ("join", "a"), ("kill", "b")])
def test_no_call_reaches_other_weights_under_random_membership(
    story: list[tuple[str, Any]],
) -> None:
    asyncio.run(_told(story))


async def _told(story: list[tuple[str, Any]]) -> None:
    async with running() as world:
        publishing: asyncio.Task[None] | None = None
        for what, which in story:
            if what == "publish" and (publishing is None or publishing.done()):
                publishing = asyncio.create_task(world.publish())
            elif what == "tick":
                for _ in range(which):
                    await asyncio.sleep(0)
            elif what == "join" and which not in world.rows:
                await world.started()
                world.machines[which] = Machine("default")
                await world.join(which)
            elif what == "leave":
                await world.remove_engine(which)
            elif what == "kill" and which in world.machines:
                world.machines[which].alive = False
            elif what == "back" and which in world.machines and not world.machines[which].alive:
                await world.back(which, "default")
            elif what == "refuse" and which in world.machines:
                world.machines[which].fault = EngineError("no")
            world.check()
        for url, machine in world.machines.items():
            machine.fault = None
            if not machine.alive:
                await world.back(url, "default")
        if publishing is not None:
            await publishing
        await world.publish()
        await world.until(lambda: all(map(world.serves, world.rows)))
        await world.until(lambda: set(world.engines.urls()) == world.rows.keys())
        assert "own" in world.rows


async def test_a_run_waits_for_engines_of_every_policy() -> None:
    async with running() as world:
        world.machines["others"] = Machine("0")
        await world.remove_engine("own")
        await world.engines.open(["own", "others"], ["solver", "verifier"])
        told: list[Collection[str]] = []
        world.engines.on_poll = lambda unserved, rate: told.append(unserved)
        await world.until(lambda: told[-1:] == [set()])
        world.machines["others"].alive = False
        await world.until(lambda: told[-1] == {"verifier"})
        world.machines["own"].alive = False
        await world.until(lambda: told[-1] == {""})
        world.machines["own"].alive = world.machines["others"].alive = True
        await world.until(lambda: told[-1] == set())
