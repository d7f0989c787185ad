"""The processes of a run, each on its seat in the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.trainer.cluster.actor_slots import ActorSlots
from tidegate.trainer.cluster.actors import AgentActor, RankActor, ServerActor
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode
from tidegate.trainer.cluster.file_transfer import FileBundle, FileSender
from tidegate.trainer.cluster.remote import RemoteAgents, RemoteProcess, RemoteRank, RemoteServer
from tidegate.trainer.processes.provider import CurrentWeights
from tidegate.trainer.processes.servers import (
    MAX_RESTARTS,
    agent_names,
    engine_names,
    engine_server,
    gateway_server,
    restart_s,
    snapshot_weights,
)

GATHER_S = 3.0


class RayProcesses:
    """`trainer.parts.Parts` of a cluster. Made on the node where the run is."""

    def __init__(
        self,
        seats: ActorSlots,
        home: ClusterNode,
        pack: Callable[[], ActorContext],
        note: Callable[[str], None],
    ) -> None:
        """`pack` is asked when the run's directory is there."""
        self.host = home.address
        self._seats = seats
        self._home = home
        self._pack = pack
        self._note = note
        self._luggage: ActorContext | None = None
        self._post = FileSender()
        self._posting = asyncio.Lock()
        self._engines: list[RemoteServer] = []
        self._all: list[RemoteProcess] = []

    def engines(self, settings: Settings, run_dir: Path, live: CurrentWeights) -> Sequence[RemoteServer]:
        for index, name in enumerate(engine_names(settings)):
            build = partial(engine_server, settings, name, index)
            engine = RemoteServer(
                name,
                self._seats.take(name, ServerActor, self._packed(), build, restarts=MAX_RESTARTS),
                self._home,
                run_dir / "logs",
                live=live,
                snapshot_weights=partial(snapshot_weights, live, run_dir / "weights", name),
                send=self._send,
                ready_s=restart_s(settings.engine),
            )
            self._engines.append(engine)
        self._all += self._engines
        return self._engines

    def gateway(self, settings: Settings, run_dir: Path, key: str, journal: Path | None) -> RemoteServer:
        build = partial(gateway_server, settings, key, journal)
        actor = self._seats.take("gateway", ServerActor, self._packed(), build, restarts=MAX_RESTARTS)
        port = settings.gateway.port
        gateway = RemoteServer("gateway", actor, self._home, run_dir / "logs", port=port)
        self._all.append(gateway)
        return gateway

    def agents(self, settings: Settings, run_dir: Path) -> Sequence[RemoteAgents]:
        agent = settings.agent
        found = []
        for name in agent_names(settings):
            what = (name, agent.use, agent.options)
            actor = self._seats.take(name, AgentActor, self._packed(), *what, restarts=-1)
            found.append(RemoteAgents(name, actor, self._home, run_dir / "logs"))
        self._all += found
        return found

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[RemoteRank]:
        found = []
        for rank in range(1, settings.trainer.ranks):
            name = f"trainer-{rank}"
            actor = self._seats.take(name, RankActor, self._packed(), rank)
            found.append(RemoteRank(name, actor, self._home, run_dir / "logs", rank))
        self._all += found
        return found

    async def deliver(self, url: str, weights: Path) -> Path:
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

    async def _send(self, weights: Path) -> FileBundle:
        async with self._posting:  # several engines want the same
            return await asyncio.to_thread(self._post.parcel, weights)

    def _packed(self) -> ActorContext:
        self._luggage = self._luggage or self._pack()
        return self._luggage
