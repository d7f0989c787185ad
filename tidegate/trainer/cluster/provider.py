"""Provides the processes of a run as actors on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.service.api_key import engine_key
from tidegate.trainer.cluster.actors import Build, RankActor, ServerActor
from tidegate.trainer.cluster.connect import ActorSlots
from tidegate.trainer.cluster.environment import ActorContext, ClusterNode
from tidegate.trainer.cluster.file_transfer import FileBundle, FileSender
from tidegate.trainer.cluster.remote import RemoteProcess, RemoteRank, RemoteServer
from tidegate.trainer.processes import servers
from tidegate.trainer.processes.provider import CurrentWeights, GatewayAccess, GatewayKeys

GATHER_S = 3.0


class RayProcesses:
    """`ProcessProvider` of a Ray cluster. Created on the run's node."""

    delivers_in_place = False

    def __init__(
        self,
        slots: ActorSlots,
        home: ClusterNode,
        make_context: Callable[[], ActorContext],
        note: Callable[[str], None],
    ) -> None:
        """`make_context` is called once the run's directory exists."""
        self.host = home.address
        self._slots = slots
        self._home = home
        self._make_context = make_context
        self._note = note
        self._context: ActorContext | None = None
        self._sender = FileSender()
        self._send_lock = asyncio.Lock()
        self._engines: list[RemoteServer] = []
        self._all: list[RemoteProcess] = []

    def engines(
        self, settings: Settings, run_dir: Path, live: CurrentWeights, policy: str = ""
    ) -> Sequence[RemoteServer]:
        if policy:
            raise StartError(
                "policies are not supported on a cluster: train them on one machine, without --cluster"
            )
        if settings.trainer.lora.publish == "adapter":
            raise StartError(
                'trainer.lora.publish = "adapter" is not supported on a cluster, whose nodes may lack the '
                'base model: set it to "merged"'
            )
        key = servers.own_engine_key(settings)
        for index, name in enumerate(servers.engine_names(settings)):
            build = partial(servers.engine_server, settings, name, index, key)
            engine = self._server(
                name,
                build,
                run_dir,
                live=live,
                snapshot_weights=partial(servers.snapshot_weights, live, run_dir / "weights", name),
                send=self._send,
                ready_s=servers.restart_s(settings.engine),
            )
            self._engines.append(engine)
        return self._engines

    def teachers(self, settings: Settings, run_dir: Path) -> Mapping[str, RemoteServer]:
        if any(model.path for model in settings.trainer.teacher.models.values()):
            raise StartError(
                "trainer.teacher.path is not supported on a cluster: start the teacher with tidegate engine, "
                "and set trainer.teacher.url"
            )
        return {}

    def environments(self, settings: Settings, run_dir: Path, key: str) -> RemoteServer:
        return self._server("env", partial(servers.environment_server, settings, key), run_dir, port=0)

    def gateway(
        self, settings: Settings, run_dir: Path, keys: GatewayKeys, journal: Path | None
    ) -> RemoteServer:
        build = partial(servers.gateway_server, settings, {**keys, "engine_key": engine_key()}, journal)
        return self._server("gateway", build, run_dir, port=settings.gateway.port)

    def agents(self, settings: Settings, run_dir: Path, gateway: GatewayAccess) -> Sequence[RemoteServer]:
        # Ray limits the restarts of a whole run; `supervise_agents` limits those in a row.
        return [
            self._server(
                name, partial(servers.agent_process, settings.agent, gateway, name), run_dir, restarts=-1
            )
            for name in servers.agent_names(settings)
        ]

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[RemoteRank]:
        processes = []
        for rank in range(1, settings.trainer.ranks):
            name = f"trainer-{rank}"
            actor = self._actor(name, RankActor, rank)
            processes.append(RemoteRank(name, actor, self._home, run_dir / "logs", rank))
        self._all += processes
        return processes

    def _server(
        self, name: str, build: Build, run_dir: Path, *, restarts: int = servers.MAX_RESTARTS, **more: Any
    ) -> RemoteServer:
        actor = self._actor(name, ServerActor, build, restarts=restarts)
        server = RemoteServer(name, actor, self._home, run_dir / "logs", **more)
        self._all.append(server)
        return server

    def _actor(self, name: str, cls: type, *arguments: object, restarts: int = 0) -> Any:
        self._context = self._context or self._make_context()
        return self._slots.create_actor(name, cls, self._context, *arguments, restarts=restarts)

    async def deliver(self, url: str, weights: Path) -> Path:
        engine = next((engine for engine in self._engines if engine.url == url), None)
        return weights if engine is None else await engine.deliver(weights)

    async def gather_logs(self) -> None:
        """Copy the nodes' logs into the run's own logs, until cancelled."""
        while True:
            await asyncio.sleep(GATHER_S)
            for process in self._all:
                try:
                    await process.gather_logs()
                except StartError:  # lost, which `wait_for_exit` reports
                    continue
                except OSError as error:
                    self._note(f"logs of {process.name} could not be written: {error}")

    async def _send(self, weights: Path) -> FileBundle:
        async with self._send_lock:  # several engines need the same weights
            return await asyncio.to_thread(self._sender.bundle, weights)
