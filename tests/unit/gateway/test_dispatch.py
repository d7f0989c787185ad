"""Choice of engines and queues: what changes when engines join and leave, and the order of calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.gateway.engines.dispatcher import Dispatcher, QueueFullError, place, rank
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint
from tidegate.gateway.engines.fair_queue import FairQueue, Tickets

NAMES = st.sets(st.text("abcdefgh", min_size=1, max_size=4), min_size=2, max_size=9)
KEYS = [f"session {number}" for number in range(200)]


def engine(url: str, limit: int = 1) -> EngineEndpoint:
    return EngineEndpoint(url, (url,), healthy=True, limit=limit)


def dispatch(*engines: EngineEndpoint, max_waiting: int = 1000) -> Dispatcher:
    made = Dispatcher(max_waiting)
    for one in engines:
        made.add(one)
    return made


def seats(number: int) -> list[Affinity]:
    return [Affinity(key, key) for key in KEYS[:number]]


def sits(pool: Dispatcher, seat: Affinity) -> EngineEndpoint:
    found = pool.assign(seat)
    assert found is not None
    return found


# -- consistent hashing


@given(NAMES)
def test_an_engine_that_leaves_or_joins_moves_only_its_own_sessions(names: set[str]) -> None:
    gone = min(names)
    whole = dict.fromkeys(names, 0.0)
    rest = dict.fromkeys(names - {gone}, 0.0)
    for key in KEYS[:50]:
        assert [one for one in rank(key, whole) if one != gone] == rank(key, rest)


def test_keys_are_distributed_evenly() -> None:
    loads = dict.fromkeys("abcd", 0.0)
    won = Counter(rank(f"key {number}", loads)[0] for number in range(4000))
    assert all(850 <= count <= 1150 for count in won.values())


@given(NAMES, st.integers(1, 200))
def test_no_member_has_more_keys_than_its_share(names: set[str], keys: int) -> None:
    loads = dict.fromkeys(names, 0.0)
    for key in KEYS[:keys]:
        loads[place(key, loads)] += 1
        total = sum(loads.values())
        assert max(loads.values()) <= max(-(-total // len(names)), total * 1.25 / len(names))


@settings(deadline=None)
@given(NAMES, st.integers(1, 60), st.booleans())
def test_sessions_move_only_where_their_engine_left(names: set[str], number: int, join: bool) -> None:
    pool = dispatch(*(engine(name) for name in names))
    sitting = seats(number)
    before = {seat.flow: sits(pool, seat) for seat in sitting}
    if join:
        pool.add(engine("joined"))
    else:
        pool.remove(min(names))
    for seat in sitting:
        was, now = before[seat.flow], sits(pool, seat)
        assert (now is was) == (join or was.url != min(names))
    assert sum(one.assigned_sessions for one in pool.engines.values()) == number


def test_after_a_restart_most_sessions_find_the_engine_that_knows_them() -> None:
    names = [f"http://engine-{number}" for number in range(4)]
    homes = []
    for order in (1, -1):
        pool = dispatch(*(engine(name) for name in names))
        homes.append({seat.flow: sits(pool, seat).url for seat in seats(200)[::order]})
    same = sum(homes[0][key] == homes[1][key] for key in homes[0])
    assert same >= 120  # of 200; a choice by load alone keeps about 50


def test_a_quarantined_engine_loses_its_sessions_and_gets_none_back() -> None:
    one, other = engine("one"), engine("other")
    pool = dispatch(one, other)
    sitting = seats(10)
    for seat in sitting:
        pool.assign(seat)
    one.healthy = False
    assert {pool.assign(seat) for seat in sitting} == {other}
    one.healthy = True
    assert {pool.assign(seat) for seat in sitting} == {other}
    assert (one.assigned_sessions, other.assigned_sessions) == (0, 10)
    newcomer = Affinity("new", "new")
    assert pool.assign(newcomer) is one


def test_the_slots_of_a_group_share_an_engine_while_it_has_room() -> None:
    pool = dispatch(*(engine(f"e{number}") for number in range(3)))
    for one in pool.engines.values():
        one.assigned_sessions = 40
    members = [pool.assign(Affinity(f"slot {number}", "group")) for number in range(3)]
    assert len(set(members)) == 1


# -- the fair line


@given(st.lists(st.sampled_from("abcd"), max_size=60))
def test_between_two_items_of_one_flow_every_other_that_waits_is_served(flows: list[str]) -> None:
    line: FairQueue[int] = FairQueue()
    tickets = Tickets()
    waiting = Counter(flows)
    for number, flow in enumerate(flows):
        line.push(tickets.draw(flow), number)
    served: list[str] = []
    last: dict[str, int] = {}
    numbers: dict[str, int] = {}
    while line:
        number = line.pop()
        flow = flows[number]
        assert number > numbers.get(flow, -1), "first come, first served within a flow"
        if flow in last:
            between = set(served[last[flow] + 1 :])
            assert between >= {one for one in waiting if waiting[one] and one != flow}
        waiting[flow] -= 1
        numbers[flow], last[flow] = number, len(served)
        served.append(flow)
    assert len(served) == len(flows)


def test_a_call_removed_from_the_queue_is_not_served() -> None:
    line: FairQueue[int] = FairQueue()
    tickets = Tickets()
    places = [tickets.draw(flow) for flow in "aba"]
    for item, place_of in enumerate(places):
        line.push(place_of, item)
    assert line.discard(places[0])
    assert not line.discard(places[0])
    assert not line.discard(tickets.draw("c"))
    assert line.drain() == [1, 2]
    assert not line
    with pytest.raises(IndexError):
        line.pop()


# -- slots


async def settled(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not wanted():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


class Caller:
    """Calls of sessions: each takes a slot and keeps it until told."""

    def __init__(self, pool: Dispatcher) -> None:
        self.pool = pool
        self.served: list[tuple[str, EngineEndpoint]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def call(self, seat: Affinity, times: int = 1) -> None:
        for _ in range(times):
            before = self.pool.waiting + len(self.served)
            self.tasks.append(asyncio.create_task(self._enter(seat)))
            await settled(lambda before=before: self.pool.waiting + len(self.served) > before)

    async def _enter(self, seat: Affinity) -> None:
        engine = await self.pool.acquire(seat)
        self.served.append((seat.flow, engine))

    async def end(self, index: int) -> None:
        """End a call that was served."""
        count = len(self.served)
        more = self.pool.waiting > 0
        self.pool.release(self.served[index][1])
        await settled(lambda: len(self.served) > count or not more)


async def test_a_hundred_parallel_calls_of_one_session_starve_no_other() -> None:
    caller = Caller(dispatch(engine("e", limit=4)))
    await caller.call(Affinity("greedy", "greedy"), 104)
    others = [Affinity(f"modest {number}", "x") for number in range(5)]
    for seat in others:
        await caller.call(seat)
    assert [flow for flow, _ in caller.served] == ["greedy"] * 4
    for index in range(8):
        await caller.end(index)
    after = [flow for flow, _ in caller.served[4:]]
    assert set(after[:6]) == {"greedy", *(seat.flow for seat in others)}, "one round serves everyone"
    assert after[6:] == ["greedy"] * 2
    for index in range(8, 109):
        await caller.end(index)
    assert len(caller.served) == 109
    assert caller.pool.engines["e"].busy == 0


async def test_a_call_that_would_wait_goes_where_a_slot_is_free_and_its_session_stays() -> None:
    one, other = engine("one"), engine("other")
    caller = Caller(dispatch(one, other))
    seat = Affinity("s", "s")
    home = caller.pool.assign(seat)
    await caller.call(seat, 2)
    assert {engine for _, engine in caller.served} == {one, other}
    assert caller.pool.waiting == 0
    assert seat.engine is home


async def test_a_freed_slot_serves_its_own_sessions_first_and_then_any() -> None:
    one, other = engine("one"), engine("other")
    caller = Caller(dispatch(one, other))
    here, there = Affinity("here", "here"), Affinity("there", "there")
    here.assign(one)
    there.assign(other)
    await caller.call(here)
    await caller.call(there)
    await caller.call(there)  # waits at the other
    await caller.call(here)  # waits here, later
    await caller.end(0)
    assert caller.served[2] == ("here", one)
    await caller.end(2)
    assert caller.served[3] == ("there", one)


async def test_a_call_queued_for_a_removed_engine_moves_to_another() -> None:
    one, other = engine("one"), engine("other")
    caller = Caller(dispatch(one, other))
    mine, its = Affinity("mine", "mine"), Affinity("its", "its")
    mine.assign(one)
    its.assign(other)
    await caller.call(mine)
    await caller.call(its)
    await caller.call(mine)
    caller.pool.remove("one")
    await caller.end(1)
    assert caller.served[2] == ("mine", other)
    assert mine.engine is other


async def test_without_an_engine_calls_wait_for_the_first_one() -> None:
    caller = Caller(dispatch())
    await caller.call(Affinity("s", "s"), 2)
    assert caller.pool.waiting == 2
    late = engine("late", limit=2)
    caller.pool.add(late)
    caller.pool.dispatch_waiting(late)
    await settled(lambda: len(caller.served) == 2)
    assert late.busy == 2


async def test_a_full_queue_refuses_new_calls_and_keeps_admitted_ones() -> None:
    pool = dispatch(engine("e"), max_waiting=1)
    caller = Caller(pool)
    seat = Affinity("s", "s")
    await caller.call(seat, 2)
    with pytest.raises(QueueFullError, match="1 calls wait"):
        await pool.acquire(seat)
    goes_on = asyncio.create_task(pool.acquire(seat, fresh=False))
    await settled(lambda: pool.waiting == 2)
    goes_on.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await goes_on
    assert pool.waiting == 1


@pytest.mark.parametrize("given", [True, False], ids=["after it got the slot", "before"])
async def test_a_cancelled_wait_leaks_no_slot(given: bool) -> None:
    pool = dispatch(engine("e"))
    holder = await pool.acquire(Affinity("a", "a"))
    first = asyncio.create_task(pool.acquire(Affinity("b", "b")))
    second = asyncio.create_task(pool.acquire(Affinity("c", "c")))
    await settled(lambda: pool.waiting == 2)
    acts = [lambda: pool.release(holder), first.cancel]
    for act in acts if given else reversed(acts):
        act()  # before the first one runs
    assert await asyncio.wait_for(second, 5) is holder
    assert (holder.busy, pool.waiting) == (1, 0)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_calls_that_waited_for_an_engine_precede_later_ones() -> None:
    caller = Caller(dispatch())
    early = [Affinity(f"early {number}", "x") for number in range(4)]
    for seat in early:
        await caller.call(seat)
    back = engine("back", limit=2)
    caller.pool.add(back)
    caller.pool.dispatch_waiting(back)
    await settled(lambda: len(caller.served) == 2)
    for number in range(6):
        await caller.call(Affinity(f"late {number}", "y"))
        await caller.end(number)
    waited = [flow for flow, _ in caller.served]
    assert waited[:4] == [seat.flow for seat in early]
    assert waited[4:] == [f"late {number}" for number in range(4)]
    assert {seat.engine for seat in early} == {back}, "each sits where it was served"


async def test_a_call_moved_to_another_queue_keeps_its_place() -> None:
    one, other = engine("one"), engine("other")
    caller = Caller(dispatch(one, other))
    sitting = [Affinity(f"{number} on {home.url}", "x") for number in range(3) for home in (one, other)]
    for seat in sitting:
        seat.assign(one if seat.flow.endswith("one") else other)
        await caller.call(seat)
    caller.pool.remove("one")
    for number in range(4):
        await caller.end(1 + number)
    assert [flow for flow, _ in caller.served[2:]] == [seat.flow for seat in sitting[2:]]


async def test_an_idle_engine_takes_the_oldest_call_of_all_queues() -> None:
    one, other, third = engine("one"), engine("other"), engine("third")
    caller = Caller(dispatch(one, other, third))
    homes = {one: "a", other: "b", third: "c"}
    for home, flow in homes.items():
        seat = Affinity(flow, flow)
        seat.assign(home)
        await caller.call(seat)
    for home, flow in ((one, "first"), (other, "second"), (other, "third")):
        seat = Affinity(flow, flow)
        seat.assign(home)
        await caller.call(seat)
    await caller.end(2)
    assert caller.served[3] == ("first", third)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["call", "end", "up", "down", "cancel"]), min_size=5, max_size=60))
def test_no_call_goes_before_one_that_came_earlier_and_waits_for_the_same_engine(moves: list[str]) -> None:
    asyncio.run(_never_overtaken(moves))


async def _never_overtaken(moves: list[str]) -> None:
    """Sessions of one call each, on one engine that comes and goes."""
    only = engine("only", limit=2)
    caller = Caller(dispatch(only))
    came, given_up, ended = 0, set(), 0
    for move in moves:
        if move == "call":
            await caller.call(Affinity(str(came), "x"))
            came += 1
        elif move == "end" and ended < len(caller.served):
            caller.pool.release(caller.served[ended][1])
            ended += 1
        elif move in ("up", "down"):
            only.healthy = move == "up"
            (caller.pool.dispatch_waiting if only.healthy else caller.pool.requeue)(only)
            await settled(lambda: not (only.has_free_slot and caller.pool.waiting))
        elif move == "cancel":
            for number, task in enumerate(caller.tasks):
                if not task.done() and number % 3 == 0:
                    task.cancel()
                    given_up.add(number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    served = [int(flow) for flow, _ in caller.served]
    assert served == sorted(served)
    assert caller.pool.waiting == came - len(served) - len(given_up)
    for task in caller.tasks:
        task.cancel()
    await asyncio.gather(*caller.tasks, return_exceptions=True)


# -- a candidate version


async def test_only_sessions_of_the_candidate_are_served_by_its_engines() -> None:
    live, tested = engine("live"), engine("tested")
    caller = Caller(dispatch(live, tested))
    caller.pool.regroup({"tested"})
    users, canary = Affinity("user", "k"), Affinity("canary", "k", candidate=True)
    await caller.call(users, 2)
    await caller.call(canary, 2)
    assert caller.served == [("user", live), ("canary", tested)]
    await caller.end(0)
    await caller.end(1)
    assert caller.served[2:] == [("user", live), ("canary", tested)], "no free slot serves the others"


async def test_waiting_calls_follow_when_a_candidate_comes_and_goes() -> None:
    live, tested = engine("live"), engine("tested")
    caller = Caller(dispatch(live, tested))
    users, canary = Affinity("user", "k"), Affinity("canary", "k", candidate=True)
    users.assign(tested)
    await caller.call(users, 3)
    assert caller.pool.waiting == 1
    caller.pool.regroup({"tested"})
    await caller.call(canary)
    assert caller.pool.waiting == 2
    first = next(index for index, (_, one) in enumerate(caller.served) if one is tested)
    await caller.end(first)
    assert caller.served[2] == ("canary", tested)
    tested.healthy = False  # the candidate's engine fails; its calls wait for it
    await caller.call(canary)
    assert caller.pool.waiting == 2
    caller.pool.regroup(())
    await caller.end(1 - first)
    await caller.end(3)
    assert [flow for flow, _ in caller.served[3:]] == ["user", "canary"]
    assert {one.url for _, one in caller.served[3:]} == {"live"}
    assert caller.pool.waiting == 0


# -- policies


async def test_a_call_goes_to_an_engine_of_its_policy_and_waits_for_one_while_others_are_free() -> None:
    mine, other = engine("mine"), engine("other", limit=4)
    mine.policy, other.policy = "solver", "verifier"
    pool = dispatch(mine, other)
    solver = [Affinity(key, key, policy="solver") for key in KEYS[:3]]
    assert await pool.acquire(solver[0]) is mine
    waiting = [asyncio.ensure_future(pool.acquire(seat)) for seat in solver[1:]]
    await asyncio.sleep(0)
    assert await pool.acquire(Affinity("v", "v", policy="verifier")) is other
    assert (pool.waiting, other.busy) == (2, 1)
    pool.release(other)
    assert pool.waiting == 2
    mine.healthy = False
    pool.requeue(mine)
    assert pool.assign(solver[0]) is None, "the other policy's engine does not count"
    pool.dispatch_waiting(other)
    assert pool.waiting == 2
    mine.healthy = True
    pool.release(mine)
    assert await waiting[0] is mine
    pool.release(mine)
    assert await waiting[1] is mine


async def test_a_candidate_of_one_policy_changes_nothing_for_another() -> None:
    mine, other, candidate = engine("mine"), engine("other"), engine("candidate")
    mine.policy = "solver"
    other.policy = candidate.policy = "verifier"
    pool = dispatch(mine, other, candidate)
    pool.regroup(["candidate"])
    draws = [Affinity("s", "s", True, policy=name) for name in ("solver", "verifier")]
    assert [sits(pool, seat) for seat in draws] == [mine, candidate]


def test_probes_at_one_reading_of_the_clock_tell_no_rate() -> None:
    probed = engine("a")
    for now, total in ((1.0, 5), (1.0, 9)):
        probed.note_sampled(now, total)
    assert probed.rate == 0.0
    probed.note_sampled(3.0, 11)
    assert probed.rate == 3.0
