"""Provides the processes of a run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tidegate.config import Settings
from tidegate.service.service import LOOPBACK, Service
from tidegate.trainer.processes.agent_worker import AgentWorker
from tidegate.trainer.processes.provider import CurrentWeights, GatewayKeys
from tidegate.trainer.processes.rank_process import LocalRankProcess, rank_processes
from tidegate.trainer.processes.servers import (
    agent_names,
    engine_names,
    engine_server,
    gateway_server,
    snapshot_weights,
)


class LocalProcesses:
    """`ProcessProvider` of this machine. Processes listen on loopback, unless `gateway.host` differs."""

    host = LOOPBACK

    def engines(self, settings: Settings, run_dir: Path, current: CurrentWeights) -> Sequence[Service]:
        return [
            engine_server(
                settings,
                name,
                index,
                run_dir,
                self.host,
                0,
                partial(snapshot_weights, current, run_dir / "weights", name),
            )
            for index, name in enumerate(engine_names(settings))
        ]

    def gateway(self, settings: Settings, run_dir: Path, keys: GatewayKeys, journal: Path | None) -> Service:
        gateway = settings.gateway
        return gateway_server(settings, keys, journal, run_dir, gateway.host, gateway.port)

    def agents(self, settings: Settings, run_dir: Path) -> Sequence[AgentWorker]:
        agent = settings.agent
        return [
            AgentWorker(agent.use, agent.options, run_dir / "logs" / f"{name}.log")
            for name in agent_names(settings)
        ]

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[LocalRankProcess]:
        return rank_processes(settings.trainer.ranks, run_dir / "logs")

    async def deliver(self, url: str, weights: Path) -> Path:
        return weights
