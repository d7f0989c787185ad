"""A gateway without HTTP whose journal is copied at every write, to simulate a kill at each of them."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.journal_copy import write_journal
from tests.journal_model import CLOSING, FINISHED, State, TurnPart, differences, told
from tidegate import failpoints
from tidegate.gateway import gateway as gateway_module
from tidegate.gateway import policies
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.journal import sqlite
from tidegate.gateway.journal.recovery import load
from tidegate.gateway.options import GatewayOptions
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest, digest_of
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.turn import VersionSpan
from tidegate.types import to_wire

Files = dict[str, bytes]


@dataclass(frozen=True)
class Moment:
    """The journal's files after a simulated kill at a failpoint."""

    place: str
    files: Files


@dataclass
class Wish:
    """A request whose client received no reply."""

    session: str
    ask: TurnRequest
    index: int | None
    """Index of its turn, if it has one."""
    parent: int | None


class World:
    """Runs one gateway after another; `state` is the expected state."""

    def __init__(self, model: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.new_event_loop()
        self.state = State()
        self.unheard: list[Wish] = []
        self.crashes = 0
        self._model = model
        self._folder = folder
        self._renderer = Renderer.load(model)
        self._moments: list[Moment] | None = None
        self._wires: dict[str, bytes] = {}
        self._looked_at: tuple[Files, State] = ({}, self.state)
        self._words = 0
        self._sampled = 0
        patch.setattr(sqlite, "FLUSH_DELAY_S", 3600.0)
        patch.setattr(gateway_module, "SWEEP_S", 3600.0)
        patch.setattr(policies, "check_conformance", functools.cache(policies.check_conformance))
        patch.setattr(failpoints, "reach", self._reach)
        self.run(self._start({}))

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.gateway.close())
        self.loop.close()

    # -- crashes ---------------------------------------------------------------------------------

    def _reach(self, place: str) -> None:
        if self._moments is not None:
            self._moments.append(Moment(place, self._files()))

    def _files(self) -> Files:
        return {path.name: path.read_bytes() for path in self._home.iterdir()}

    async def _start(self, files: Files) -> None:
        self._home = self._laid(f"{self.crashes}", files)
        options = GatewayOptions(model=self._model, journal=self._home)
        self.gateway = Gateway(options, self._renderer)
        await self.gateway.start()
        self.gateway.pool.sample = self._sample  # type: ignore[method-assign, assignment]

    def _laid(self, name: str, files: Files) -> Path:
        return write_journal(self._folder / name, files)

    def do(
        self, work: Callable[[], Awaitable[Any]], then: Callable[[Any], list[State]], crash: float | None
    ) -> bool:
        """Runs `work`, which leads from the state through the states that `then` gives for its result.

        Checks that a kill at any moment leaves one of these states, and that a later moment never leaves an
        earlier state. With `crash`, the gateway is killed at one of the moments and the result is lost.
        Returns whether the work was completed.
        """
        self._moments = []
        result = self.run(work())
        moments, self._moments = self._moments, None
        states = [self.state, *then(result)]
        answered = Moment("answered", self._files())
        at = 0
        for moment in [*moments, *self._torn(moments, crash)]:
            at = max(at if not moment.place.startswith("torn") else 0, self._match(moment, states))
        assert self._match(answered, states) == len(states) - 1, "what was answered is there"
        if crash is None:
            self.state = states[-1]
            return True
        places = [*moments, *self._torn(moments, crash)] or [answered]
        moment = places[min(int(crash * len(places)), len(places) - 1)]
        self._crash(moment, states[self._match(moment, states)])
        return False

    def _torn(self, moments: list[Moment], crash: float | None) -> list[Moment]:
        """Moments of a kill during a write, with only a part of the new bytes in the log."""
        torn = []
        for before, after in pairwise(moments):
            old, new = before.files, after.files
            log = f"{sqlite.FILE}-wal"
            if old.keys() == new.keys() and old[sqlite.FILE] == new[sqlite.FILE]:
                size = int(len(new.get(log, b"")) * (0.5 if crash is None else crash))
                mixed = new.get(log, b"")[:size] + old.get(log, b"")[size:]
                torn.append(Moment(f"torn at {size}, {after.place}", {**new, log: mixed}))
        return torn

    def _match(self, moment: Moment, states: list[State]) -> int:
        """Index of the state that a restart recovers."""
        if self._looked_at[0] != moment.files:
            self._looked_at = moment.files, told(self.run(self._loaded(moment.files)))
        found = self._looked_at[1]
        wanted = [state.kept() for state in states]
        matching = [index for index, state in enumerate(wanted) if state == found]
        assert matching, "\n\n".join(
            f"{moment.place}, state {index}:\n{differences(found, state)}"
            for index, state in enumerate(wanted)
        )
        return matching[-1]

    async def _loaded(self, files: Files) -> Any:
        moments, self._moments = self._moments, None
        connection = sqlite._opened(self._laid("look", files) / sqlite.FILE)
        try:
            recovered = load(connection)
        finally:
            connection.close()
            self._moments = moments
        for session in recovered.sessions:
            if session.trajectory is not None and session.id in self._wires:
                assert to_wire(session.trajectory) == self._wires[session.id], "a trajectory is for good"
        return recovered

    def _crash(self, moment: Moment, state: State) -> None:
        """Restarts the gateway from the journal; sessions that were finishing are then finished."""
        self.run(self.gateway.close())
        self.crashes += 1
        self.run(self._start(moment.files))
        self.run(self.finishing())
        self.state = state.kept()
        for name, part in self.state.sessions.items():
            if part.state == CLOSING:
                part.state, part.reward = FINISHED, state.sessions[name].reward
            elif part.epoch is not None and part.epoch < self.state.epoch and part.state != FINISHED:
                part.cancel()
                part.state = FINISHED
        assert self._match(Moment("started again", self._files()), [self.state]) == 0
        known = self.state.sessions
        self.unheard = [wish for wish in self.unheard if wish.session in known]
        for wish in self.unheard:
            if wish.index is not None and wish.index >= len(known[wish.session].turns):
                wish.index = None

    async def finishing(self) -> None:
        """Waits until no session is finishing."""
        for session in self.gateway.sessions.all():
            if session.finishing is not None:
                await session.finishing

    def answered_finish(self, name: str) -> None:
        """Records the trajectory given to a client, which must never change."""
        trajectory = self.session(name).trajectory
        assert trajectory is not None
        self._wires[name] = to_wire(trajectory)

    # -- requests --------------------------------------------------------------------------------

    def session(self, name: str) -> GatewaySession:
        return self.gateway.session(name)

    def ask(self, name: str, parent: int | None, key: str | None) -> TurnRequest:
        """A request that continues a turn, or starts a new root."""
        self._words += 1
        before = [] if parent is None else self.session(name).tree.history(parent)
        messages = [*before, {"role": "user", "content": f"w{self._words}"}]
        return TurnRequest(
            messages, digest=digest_of(b"", json.dumps(messages).encode()), idempotency_key=key
        )

    async def replies(self, name: str, *asks: TurnRequest, answered: bool) -> list[str]:
        """Sends requests simultaneously; if not `answered`, the client leaves before the reply."""
        session, turns = self.session(name), self.gateway.turns
        calls = [turns.call(session, ask) for ask in asks]
        texts = [await self._reply(call) for call in calls]
        for call in calls if answered else ():
            turns.deliver(session, call)
            self.gateway.journal.sent(session, call.recorded.turn.index)
        return texts

    async def _reply(self, call: ModelCall) -> str:
        if call.task is not None:
            await call.task
        assert call.refusal is None, call.refusal
        return str(call.reader.message()["content"])

    async def _sample(self, order: GenerateRequest, *_: Any) -> GenerateResult:
        await asyncio.sleep(0)
        self._sampled += 1
        ids = self._renderer.encode(f"r{self._sampled}")
        logprobs = (-np.arange(len(ids)) / 8 - self._sampled).tolist()
        return GenerateResult(ids, logprobs, [VersionSpan(self._sampled, 0, len(ids))], "stop", 0, None)

    @property
    def sampled(self) -> int:
        return self._sampled

    def part(self, text: str, ask: TurnRequest, parent: int | None, *, answered: bool) -> TurnPart:
        return TurnPart(text, parent, ask.idempotency_key, delivered=answered)
