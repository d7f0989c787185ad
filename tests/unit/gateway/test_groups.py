"""Groups with fenced leases: examples, and a state machine against a plain model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.errors import GatewayError
from tidegate.gateway.groups.store import GroupStore
from tidegate.gateway.journal.base import Journal, Recovered
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.types import Group


def group(name: str) -> Group:
    return Group(name, "task", [])


def new_store(members: Callable[[str], list[GatewaySession]] = lambda _: []) -> GroupStore:
    return GroupStore(Journal(), members)


async def test_groups_come_in_the_order_of_sealing() -> None:
    store = new_store()
    for name in "cab":
        await store.seal(group(name))
    assert [one.id for one in await store.lease(1, 2, 0)] == ["c", "a"]
    assert [one.id for one in await store.lease(1, 9, 0)] == ["b"]


async def test_a_lease_waits_for_a_group_and_no_longer_than_it_may() -> None:
    store = new_store()
    assert await store.lease(1, 1, 0.01) == []
    waiting = asyncio.create_task(store.lease(1, 1, 30))
    await asyncio.sleep(0)
    await store.seal(group("a"))
    assert [one.id for one in await waiting] == ["a"]


async def test_a_newer_trainer_takes_over() -> None:
    store = new_store()
    for name in "ab":
        await store.seal(group(name))
    [old, _] = [(one.id, one.lease_id) for one in await store.lease(1, 2, 0)]
    assert [one.id for one in await store.lease(2, 2, 0)] == ["a", "b"]
    for call in (store.lease(1, 1, 0), store.ack(1, old[1], "trained")):
        with pytest.raises(GatewayError, match="epoch 1 is over") as raised:
            await call
        assert raised.value.status == 410
    with pytest.raises(GatewayError, match="newer trainer") as raised:
        await store.ack(2, old[1], "trained")
    assert raised.value.status == 410


async def test_a_trainer_that_is_replaced_while_it_waits_its_turn_changes_nothing() -> None:
    store = new_store()
    await store.seal(group("a"))
    behind = [
        asyncio.create_task(work)
        for work in (store.begin_epoch(2), store.seal(group("b"), 1), store.drop("a", 1))
    ]
    entered, *ended = await asyncio.gather(*behind, return_exceptions=True)
    assert entered is None
    assert all(isinstance(one, GatewayError) and one.status == 410 for one in ended)
    assert [entry.id for entry in store.entries()] == ["a"]
    await store.drop("a", 2)
    await store.seal(group("b"), 2)
    assert [entry.id for entry in store.entries()] == ["b"]


async def test_a_trainer_that_waits_learns_that_it_was_replaced() -> None:
    store = new_store()
    waiting = asyncio.create_task(store.lease(1, 1, 30))
    await asyncio.sleep(0)
    assert await store.lease(2, 1, 0) == []
    with pytest.raises(GatewayError, match="epoch 1 is over"):
        await waiting


async def test_acknowledging_is_idempotent_and_frees() -> None:
    store = new_store()
    await store.seal(group("a"))
    [one] = await store.lease(1, 1, 0)
    await store.ack(1, one.lease_id, "trained")
    assert await store.ack(1, one.lease_id, "trained") == []
    assert store.entries() == []
    with pytest.raises(GatewayError, match="there is no lease") as raised:
        await store.ack(1, "nonsense", "trained")
    assert raised.value.status == 404
    with pytest.raises(GatewayError, match="has ended: trained") as raised:
        await store.seal(group("a"))
    assert raised.value.status == 410


async def test_a_group_dropped_while_leased_may_still_be_acknowledged() -> None:
    store = new_store()
    await store.seal(group("a"))
    [one] = await store.lease(1, 1, 0)
    await store.drop("a")
    assert await store.ack(1, one.lease_id, "stale") == []


async def test_a_lease_that_was_not_delivered_is_given_again() -> None:
    store = new_store()
    await store.seal(group("a"))
    lost = await store.lease(1, 1, 0)
    await store.release([one.lease_id for one in lost])
    assert [one.id for one in await store.lease(1, 1, 0)] == ["a"]


async def test_a_repeated_lease_request_gets_the_same_lease() -> None:
    store = new_store()
    for name in "abc":
        await store.seal(group(name))
    first = [(one.id, one.lease_id) for one in await store.lease(1, 2, 0, "request 1")]
    again = [(one.id, one.lease_id) for one in await store.lease(1, 2, 0, "request 1")]
    assert first == again
    assert [one.id for one in await store.lease(1, 2, 0, "request 2")] == ["c"]


class Leases(RuleBasedStateMachine):
    """Two or more trainers of rising epochs over one store, against a model that is obviously right."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = self.loop.run_until_complete(_made())
        self.epoch = 0
        self.sealed: list[str] = []  # in order; what is here and not ended
        self.held: dict[str, str] = {}  # lease → group, of the current epoch
        self.fenced: list[str] = []
        self.acked: list[str] = []
        self.consumed: list[str] = []
        self.names = 0

    def teardown(self) -> None:
        self.loop.close()

    def run(self, coroutine):  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(coroutine)

    def enter(self, epoch: int) -> bool:
        if epoch > self.epoch:
            self.epoch = epoch
            self.fenced += self.held
            self.held = {}
        return epoch == self.epoch

    @rule()
    def seal(self) -> None:
        name = f"g{self.names}"
        self.names += 1
        self.run(self.store.seal(group(name)))
        self.sealed.append(name)

    @rule(step=st.integers(-1, 1), most=st.integers(1, 3))
    def lease(self, step: int, most: int) -> None:
        epoch = max(0, self.epoch + step)
        if not self.enter(epoch):
            with pytest.raises(GatewayError, match="is over"):
                self.run(self.store.lease(epoch, most, 0))
            return
        given = self.run(self.store.lease(epoch, most, 0))
        free = [name for name in self.sealed if name not in self.held.values()]
        assert [one.id for one in given] == free[:most]
        self.held |= {one.lease_id: one.id for one in given}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), step=st.integers(-1, 1))
    def ack(self, data: st.DataObject, step: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        epoch = max(0, self.epoch + step)
        name = self.held[lease]
        if not self.enter(epoch) or lease not in self.held:
            with pytest.raises(GatewayError) as raised:
                self.run(self.store.ack(epoch, lease, "trained"))
            assert raised.value.status == 410
            return
        self.run(self.store.ack(epoch, lease, "trained"))
        del self.held[lease]
        self.sealed.remove(name)
        self.acked.append(lease)
        self.consumed.append(name)

    @precondition(lambda self: self.acked or self.fenced)
    @rule(data=st.data())
    def ack_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.acked + self.fenced))
        if lease in self.acked:
            self.run(self.store.ack(self.epoch, lease, "trained"))
        else:
            with pytest.raises(GatewayError, match="newer trainer"):
                self.run(self.store.ack(self.epoch, lease, "trained"))

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.sealed))
        self.run(self.store.drop(name))
        self.sealed.remove(name)
        for lease in [lease for lease, held in self.held.items() if held == name]:
            del self.held[lease]
            self.acked.append(lease)

    @invariant()
    def the_store_is_the_model(self) -> None:
        assert {entry.id: entry.state for entry in self.store.entries()} == {
            name: "leased" if name in self.held.values() else "ready" for name in self.sealed
        }
        assert len(self.consumed) == len(set(self.consumed))


async def _made() -> GroupStore:
    return new_store()


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLeases = Leases.TestCase


async def test_an_answer_that_was_lost_after_it_was_asked_for_again_undoes_nothing() -> None:
    store = new_store()
    await store.seal(group("g"))
    [lost] = await store.lease(1, 1, 0, "key")
    [again] = await store.lease(1, 1, 0, "key")
    await store.release([lost.lease_id])
    assert await store.lease(1, 1, 0, "other") == []
    assert await store.ack(1, again.lease_id, "trained") == []
    assert store.end_reason("g") == "trained"


async def test_waiting_for_a_group_leases_nothing() -> None:
    store = new_store()
    assert await store.wait(1, 0.01) == 0
    waiting = asyncio.create_task(store.wait(1, 10))
    await asyncio.sleep(0)
    await store.seal(group("g"))
    assert await asyncio.wait_for(waiting, 5) == 1
    assert [one.state for one in store.entries()] == ["ready"]
    assert await store.lease(1, 0, 10, "key") == [], "nothing was leased under this key"
    with pytest.raises(GatewayError, match="epoch 0 is over"):
        await store.wait(0, 10)


class Failing(Journal):
    """One thing cannot be written."""

    def __init__(self, what: str) -> None:
        async def fails(*_: object, **__: object) -> None:
            raise GatewayError("the disk is full", status=503)

        setattr(self, what, fails)


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("sealed", {}),
        ("leased", {"g": "ready"}),
        ("returned", {"g": "leased"}),
        ("ended", {"g": "leased"}),
        ("entered", {"g": "leased"}),
    ],
)
async def test_what_could_not_be_written_did_not_happen(what: str, left: dict[str, str]) -> None:
    store = GroupStore(Failing(what), lambda _: [])
    store.restore(Recovered(epoch=1))

    async def through() -> None:
        await store.seal(group("g"))
        [one] = await store.lease(1, 1, 0)
        if what == "returned":
            await store.release([one.lease_id])
        elif what == "entered":
            await store.begin_epoch(2)
        else:
            await store.ack(1, one.lease_id, "trained")

    with pytest.raises(GatewayError, match="disk is full"):
        await through()
    assert {entry.id: entry.state for entry in store.entries()} == left
    assert (store.epoch, store.end_reason("g"), store.sealed) == (1, None, len(left))
