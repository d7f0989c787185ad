"""The processes of a run, each on its seat in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.trainer.cluster.hosts import AgentHost, RankHost, ServerHost
from tidegate.trainer.cluster.parcels import Parcel, Post
from tidegate.trainer.cluster.passing import Luggage, Node
from tidegate.trainer.cluster.placed import Placed, PlacedAgents, PlacedRank, PlacedServer
from tidegate.trainer.cluster.seats import Seats
from tidegate.trainer.parts import Live
from tidegate.trainer.servers import (
    MAX_RESTARTS,
    agent_names,
    engine_names,
    engine_server,
    gateway_server,
    pinned,
    restart_s,
)

GATHER_S = 3.0


class ClusterParts:
    """`trainer.parts.Parts` of a cluster. Made on the node where the run is."""

    def __init__(
        self, seats: Seats, home: Node, pack: Callable[[], Luggage], note: Callable[[str], None]
    ) -> None:
        """`pack` is asked when the run's directory is there."""
        self.host = home.address
        self._seats = seats
        self._home = home
        self._pack = pack
        self._note = note
        self._luggage: Luggage | None = None
        self._post = Post()
        self._posting = asyncio.Lock()
        self._engines: list[PlacedServer] = []
        self._all: list[Placed] = []

    def engines(self, settings: Settings, run_dir: Path, live: Live) -> Sequence[PlacedServer]:
        for index, name in enumerate(engine_names(settings)):
            build = partial(engine_server, settings, name, index)
            engine = PlacedServer(
                name,
                self._seats.take(name, ServerHost, self._packed(), build, restarts=MAX_RESTARTS),
                self._home,
                run_dir / "logs",
                live=live,
                pinned=partial(pinned, live, run_dir / "weights", name),
                send=self._send,
                ready_s=restart_s(settings.engine),
            )
            self._engines.append(engine)
        self._all += self._engines
        return self._engines

    def gateway(self, settings: Settings, run_dir: Path, key: str, journal: Path | None) -> PlacedServer:
        build = partial(gateway_server, settings, key, journal)
        actor = self._seats.take("gateway", ServerHost, self._packed(), build, restarts=MAX_RESTARTS)
        port = settings.gateway.port
        gateway = PlacedServer("gateway", actor, self._home, run_dir / "logs", port=port)
        self._all.append(gateway)
        return gateway

    def agents(self, settings: Settings, run_dir: Path) -> Sequence[PlacedAgents]:
        agent = settings.agent
        found = []
        for name in agent_names(settings):
            what = (name, agent.use, agent.options)
            actor = self._seats.take(name, AgentHost, self._packed(), *what, restarts=-1)
            found.append(PlacedAgents(name, actor, self._home, run_dir / "logs"))
        self._all += found
        return found

    def followers(self, settings: Settings, run_dir: Path) -> Sequence[PlacedRank]:
        found = []
        for rank in range(1, settings.trainer.ranks):
            name = f"trainer-{rank}"
            actor = self._seats.take(name, RankHost, self._packed(), rank)
            found.append(PlacedRank(name, actor, self._home, run_dir / "logs", rank))
        self._all += found
        return found

    async def place(self, url: str, weights: Path) -> Path:
        engine = next((one for one in self._engines if one.url == url), None)
        return weights if engine is None else await engine.place(weights)

    async def gather_logs(self) -> None:
        """Bring what nodes write into the run's own logs, for ever."""
        while True:
            await asyncio.sleep(GATHER_S)
            for one in self._all:
                try:
                    await one.gather_logs()
                except StartError:  # it is lost; who watches it says so
                    continue
                except OSError as error:
                    self._note(f"logs of {one.name} could not be written: {error}")

    async def _send(self, weights: Path) -> Parcel:
        async with self._posting:  # several engines want the same
            return await asyncio.to_thread(self._post.parcel, weights)

    def _packed(self) -> Luggage:
        self._luggage = self._luggage or self._pack()
        return self._luggage
