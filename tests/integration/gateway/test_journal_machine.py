"""Random sessions, turns, groups and leases over a journal that is killed at every write.

After each step, a kill at each of its writes is simulated: what was acknowledged must be recovered, and what
was not must be recovered completely or not at all. Sometimes the gateway is really killed at one of these
writes, and the clients continue with the next one.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.journal_model import FINISHED, OPEN, GroupPart, SessionPart, State
from tests.journal_world import Wish, World
from tests.tiny_tokenizer import make_model_dir
from tidegate.gateway.sessions.session import FinishReport, SessionRequest
from tidegate.types import Task

TASK = Task("t1", "none", [])
KILLED = 0.25
"""How often a step is killed."""
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Each simulated kill writes and opens a journal: on a disk, most of the time is fsync."""


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.patch = pytest.MonkeyPatch()
        home = Path(self.folder.name)
        self.world = World(make_model_dir(home / "tiny"), home, self.patch)
        self.outbox: set[tuple[str, int]] = set()
        """Turns that went out, which the gateway has not noted."""
        self.keyed: list[tuple[Wish, str]] = []
        self.names = self.steps = 0

    def teardown(self) -> None:
        self.world.close()
        self.patch.undo()
        self.folder.cleanup()

    # -- what there is ---------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.world.state

    def open(self) -> list[str]:
        return [name for name, part in self.state.sessions.items() if part.state == OPEN]

    def loose(self) -> list[str]:
        """Sessions that are in no sealed group."""
        return [name for name, part in self.state.sessions.items() if part.group not in self.state.groups]

    def wishes(self) -> list[Wish]:
        return [wish for wish in self.world.unheard if wish.session in self.open()]

    def leases(self) -> dict[str, str]:
        return {part.lease: name for name, part in self.state.groups.items() if part.lease is not None}

    def do(self, work: Any, then: Any, crash: float | None) -> bool:
        done = self.world.do(work, then, crash)
        if not done:
            self.outbox.clear()
        self.world.run(self.world.finishing())
        here = self.state.sessions
        self.outbox = {one for one in self.outbox if one[0] in here}
        return done

    def actions(self) -> list[tuple[Any, int, Any]]:
        """What can be done now: how often, and whether there is something to do it to."""
        groups = {part.group for part in self.state.sessions.values()} - {None}
        return [
            (self.asks, 6, self.open()),
            (self.retries, 4, self.wishes()),
            (self.repeats_a_key, 1, any(wish.session in self.open() for wish, _ in self.keyed)),
            (self.notes_what_went_out, 1, self.outbox),
            (self.rewards, 1, self.open()),
            (self.finishes, 2, self.state.sessions),
            (self.goes, 1, len(self.state.sessions) > 4 and self.loose()),
            (self.seals, 3, self.sealable()),
            (self.leases_groups, 3, self.state.groups),
            (self.acknowledges, 1, self.leases()),
            (self.gives_back, 1, self.leases()),
            (self.is_replaced, 1, self.leases() or len(self.open()) > 2),
            (self.drops, 1, len(groups) > 2),
            (self.opens, 2, True),
            (self.goes_through_an_episode, 4, True),
        ]

    @rule(seed=st.integers(0, 2**32 - 1))
    def step(self, seed: int) -> None:
        """Everything in a step follows from one number: how many writes the journal's thread takes together,
        and so what a kill leaves, is a matter of timing, and Hypothesis must be asked the same every time."""
        self.steps += 1
        self.rng = random.Random(f"{self.steps} {seed}")
        ready = [action for action, times, may in self.actions() for _ in range(times) if may]
        crash = self.rng.random() if self.rng.random() < KILLED else None
        self.rng.choice(ready)(crash)

    # -- sessions --------------------------------------------------------------------------------

    def goes_through_an_episode(self, crash: float | None) -> None:
        """What sessions are for: without it few groups would ever come to be sealed."""
        before = set(self.state.sessions)
        self.open_one(f"g{self.names // 3}", self.state.epoch, None)
        for name in set(self.state.sessions) - before:
            wish = Wish(name, self.world.ask(name, None, None), None, None)
            self.ask(name, [wish], answered=True, crash=None)
            self.finish(name, 1, crash)

    def opens(self, crash: float | None) -> None:
        group, epoch = f"g{self.names // 3}", self.state.epoch
        self.open_one(self.rng.choice([None, group]), self.rng.choice([None, epoch]), crash)

    def open_one(self, group: str | None, epoch: int | None, crash: float | None) -> None:
        gateway = self.world.gateway
        self.names += 1
        if group in self.state.groups or group in self.state.ended:
            group = None

        def then(result: Any) -> list[State]:
            after = self.state.copy()
            after.sessions[result[0].id] = SessionPart(group, epoch)
            return [after]

        request = SessionRequest(task=TASK, group_id=group, trainer_epoch=epoch)
        self.do(lambda: gateway.open_session(request), then, crash)

    def ask(self, name: str, wishes: list[Wish], *, answered: bool, crash: float | None) -> None:
        """Requests whose turns are new; those without an answer are remembered."""
        base = len(self.state.sessions[name].turns)
        for number, wish in enumerate(wishes):
            wish.index = base + number
        self.world.unheard += [wish for wish in wishes if wish not in self.world.unheard]
        asks = [wish.ask for wish in wishes]
        texts: list[str] = []

        def then(result: list[str]) -> list[State]:
            texts.extend(result)
            states, after = [], self.state.copy()
            for wish, text in zip(wishes, result, strict=True):
                part = after.sessions[name]
                part.turns.append(self.world.part(text, wish.ask, wish.parent, answered=answered))
                if wish.parent is not None:
                    quoted = part.turns[wish.parent]
                    quoted.delivered, quoted.doubt = True, False
                states.append(after.copy())
            return states

        if self.do(lambda: self.world.replies(name, *asks, answered=answered), then, crash) and answered:
            self.heard(wishes, texts)

    def heard(self, wishes: list[Wish], texts: list[str]) -> None:
        for wish, text in zip(wishes, texts, strict=True):
            self.world.unheard.remove(wish)
            assert wish.index is not None
            self.outbox.add((wish.session, wish.index))
            if wish.ask.idempotency_key is not None:
                self.keyed.append((wish, text))

    def asks(self, crash: float | None) -> None:
        at_once = self.rng.randint(1, 2)
        answered = self.rng.randint(0, 3)
        name = self.rng.choice(self.open())
        turns = self.state.sessions[name].turns
        known = [index for index, turn in enumerate(turns) if turn.delivered]
        wishes = []
        for _ in range(at_once):
            parent = self.rng.choice([None, *known, *known[-1:], *known[-1:]])
            key = f"k{self.names}" if self.rng.random() < 0.5 else None
            self.names += 1
            wishes.append(Wish(name, self.world.ask(name, parent, key), None, parent))
        self.ask(name, wishes, answered=answered > 0, crash=crash)

    def retries(self, crash: float | None) -> None:
        """The SDK sends a request again that it got no reply to."""
        wish = self.rng.choice(self.wishes())
        wish.ask = replace(wish.ask, retry=True)
        if wish.index is None:
            self.ask(wish.session, [wish], answered=True, crash=crash)
            return
        before, index = self.world.sampled, wish.index
        if self.again(wish, self.state.sessions[wish.session].turns[index].text, crash):
            self.heard([wish], [self.state.sessions[wish.session].turns[index].text])
        assert self.world.sampled == before, "what is recorded is not sampled again"

    def again(self, wish: Wish, text: str, crash: float | None) -> bool:
        """A request whose turn there is gets just that."""
        name, index = wish.session, wish.index
        assert index is not None

        def then(result: list[str]) -> list[State]:
            assert result == [text]
            after = self.state.copy()
            turn = after.sessions[name].turns[index]
            turn.delivered, turn.doubt = True, False
            return [after]

        return self.do(lambda: self.world.replies(name, wish.ask, answered=True), then, crash)

    def repeats_a_key(self, crash: float | None) -> None:
        """An Idempotency-Key gets its reply, however often it comes."""
        wish, text = self.rng.choice([one for one in self.keyed if one[0].session in self.open()])
        before = self.world.sampled
        if self.again(wish, text, crash):
            assert wish.index is not None
            self.outbox.add((wish.session, wish.index))
        assert self.world.sampled == before

    def notes_what_went_out(self, crash: float | None) -> None:
        journal: Any = self.world.gateway.journal

        async def flush() -> None:
            journal._flush()
            await journal._writer.write("flushed")

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            for name, index in self.outbox:
                after.sessions[name].turns[index].noted = True
            return [after]

        if self.do(flush, then, crash):
            self.outbox.clear()

    def rewards(self, crash: float | None) -> None:
        value = self.rng.randint(-2, 2)
        name = self.rng.choice(self.open())
        part = self.rng.choice(["a", "b"])
        indexes = range(len(self.state.sessions[name].turns))
        turn = self.rng.choice([None, *indexes])

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            session = after.sessions[name]
            own = session.rewards if turn is None else session.turn_rewards.setdefault(turn, {})
            own[part] = float(value)
            return [after]

        self.do(lambda: self.world.gateway.post_reward(name, part, float(value), turn), then, crash)

    def finishes(self, crash: float | None) -> None:
        """Again and again, too."""
        value = self.rng.randint(0, 1)
        self.finish(self.rng.choice(list(self.state.sessions)), value, crash)

    def finish(self, name: str, value: int, crash: float | None) -> None:
        def then(_: Any) -> list[State]:
            closing = self.state.copy()
            if closing.sessions[name].state == FINISHED:
                return [closing]
            closing.sessions[name].settle(float(value))
            finished = closing.copy()
            finished.sessions[name].state = FINISHED
            return [closing, finished]

        if self.do(lambda: self.world.gateway.finish(name, FinishReport(reward=float(value))), then, crash):
            self.world.answered_finish(name)

    def goes(self, crash: float | None) -> None:
        """A session is deleted, or expires."""
        late = self.rng.random() < 0.5
        name = self.rng.choice(self.loose())
        gateway = self.world.gateway

        async def expire() -> None:
            session = gateway.session(name)
            session.deadline = session.forget_at = 0.0
            await gateway.finisher.expire(1.0)

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.forget(name)
            return [after]

        self.do(expire if late else lambda: gateway.delete_session(name), then, crash)

    # -- groups ----------------------------------------------------------------------------------

    def sealable(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name, part in self.state.sessions.items():
            if part.group is not None and part.state == FINISHED and part.reward is not None:
                groups.setdefault(part.group, []).append(name)
        return groups

    def seals(self, crash: float | None) -> None:
        group = self.rng.choice(sorted(self.sealable()))
        members = self.sealable()[group]

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.groups.setdefault(group, GroupPart(members))
            return [after]

        self.do(lambda: self.world.gateway.seal(group, "t1", members), then, crash)

    def leases_groups(self, crash: float | None) -> None:
        """A request that is sent again, with the same key, gets the same groups."""
        most = self.rng.randint(1, 3)
        key = self.rng.choice(["", "r1", "r2"])
        epoch = self.state.epoch

        def then(result: list[Any]) -> list[State]:
            after = self.state.copy()
            held = [name for name, part in after.groups.items() if key and part.key == key]
            ready = [name for name, part in after.groups.items() if part.lease is None]
            assert [group.id for group in result] == (held or ready[:most])
            for group in result:
                after.groups[group.id].lease, after.groups[group.id].key = group.lease_id, key
            return [after]

        self.do(lambda: self.world.gateway.groups.lease(epoch, most, 0, key), then, crash)

    def acknowledges(self, crash: float | None) -> None:
        lease = self.rng.choice(list(self.leases()))
        group = self.leases()[lease]
        epoch = self.state.epoch

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.end(group, "trained")
            return [after]

        if self.do(lambda: self.world.gateway.ack(epoch, lease, "trained"), then, crash):
            self.world.run(self.world.gateway.ack(epoch, lease, "trained"))  # again

    def gives_back(self, crash: float | None) -> None:
        """The answer to a lease reached nobody."""
        lease = self.rng.choice(list(self.leases()))
        groups = self.world.gateway.groups
        group = self.leases()[lease]
        for entry in groups.entries():
            entry.deliveries = min(entry.deliveries, 1)

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.groups[group].lease, after.groups[group].key = None, ""
            return [after]

        self.do(lambda: groups.release([lease]), then, crash)

    def is_replaced(self, crash: float | None) -> None:
        """A newer trainer comes."""
        epoch = self.state.epoch + 1

        async def enter() -> None:
            await self.world.gateway.groups.begin_epoch(epoch)
            await self.world.finishing()

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.epoch = epoch
            after.release()
            states = [after.copy()]
            over = [
                part
                for part in after.sessions.values()
                if part.state == OPEN and part.epoch is not None and part.epoch < epoch
            ]
            for part in over:
                part.cancel()
                states.append(after.copy())
            for part in over:
                part.state = FINISHED
                states.append(after.copy())
            return states

        self.do(enter, then, crash)

    def drops(self, crash: float | None) -> None:
        groups = {part.group for part in self.state.sessions.values() if part.group is not None}
        group = self.rng.choice(sorted(groups))

        def then(_: Any) -> list[State]:
            after = self.state.copy()
            after.end(group, "dropped")
            return [after]

        self.do(lambda: self.world.gateway.drop(group), then, crash)

    # -- always ----------------------------------------------------------------------------------

    @invariant()
    def the_gateway_is_the_model(self) -> None:
        gateway = self.world.gateway
        assert gateway.failed is None
        assert {session.id for session in gateway.sessions.all()} == set(self.state.sessions)
        for name, part in self.state.sessions.items():
            nodes = self.world.session(name).tree.nodes
            assert [node.reply["content"] for node in nodes] == [turn.text for turn in part.turns]
            assert [node.turn.delivered for node in nodes] == [turn.delivered for turn in part.turns], name
        assert {entry.id: entry.lease_id for entry in gateway.groups.entries()} == {
            group: part.lease for group, part in self.state.groups.items()
        }


QUICK = settings(
    max_examples=5, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestQuick(Machine.TestCase):
    settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestMany(Machine.TestCase):
    settings = settings(QUICK, max_examples=60, stateful_step_count=40)
