"""Names, command lines and settings of a run's servers; nothing is started here."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tidegate.config import EngineSettings, Settings
from tidegate.service.external import READY_S
from tidegate.service.service import Service
from tidegate.settings.sections import arguments_of
from tidegate.settings.servers import EMBEDDED_ONLY, EngineCommand, GatewayCommand
from tidegate.trainer.processes.provider import CurrentWeights, GatewayKeys
from tidegate.trainer.processes.sglang import SGLangServer
from tidegate.trainer.processes.vllm import VLLMServer

MAX_RESTARTS = 5
"""Limit on the restarts of one server."""


def engine_names(settings: Settings) -> list[str]:
    """Return `engine`, or `engine-1`, `engine-2` … of several; none if `engine.urls` is set."""
    return [] if settings.engine.urls else _numbered("engine", settings.engine.count)


def agent_names(settings: Settings) -> list[str]:
    """Return `agent`, or `agent-1`, `agent-2` … of several; none if workers elsewhere run them."""
    if settings.agent.source == "remote":
        return []
    return _numbered("agent", settings.agent.workers)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]


def engine_server(
    settings: Settings, name: str, index: int, directory: Path, host: str, port: int, current: CurrentWeights
) -> Service:
    """Create one of a run's engines; it listens on `host` and starts with the current weights."""
    engine = settings.engine
    if engine.kind == "sglang":
        return SGLangServer(engine, current, directory, name, index, host)
    if engine.kind == "vllm":
        return VLLMServer(engine, current, directory, name, index, host)

    def arguments() -> list[str]:
        return [*engine_arguments(settings, current), "--host", host]

    return Service("engine", arguments, directory, name=name, port=port)


def gateway_server(
    settings: Settings,
    keys: GatewayKeys,
    journal: Path | None,
    directory: Path,
    host: str,
    port: int,
    _: CurrentWeights | None = None,
) -> Service:
    """Create the gateway with these keys. A `journal` keeps its sessions across restarts."""
    arguments = gateway_arguments(settings, host)
    if journal is not None:
        arguments += ["--journal", str(journal)]
    secrets = {**keys, "env_options": settings.env.options}
    return Service("gateway", lambda: arguments, directory, port=port, secrets=secrets, host=host)


def engine_arguments(settings: Settings, current: CurrentWeights) -> list[str]:
    """Return the arguments of an embedded engine that starts with the current weights."""
    weights, version = current()
    engine = settings.engine.model_dump(include=set(EMBEDDED_ONLY))
    command = EngineCommand.model_validate({"model": {"path": weights}, "engine": engine})
    return [*arguments_of(command), "--weight-version", str(version)]


def gateway_arguments(settings: Settings, host: str) -> list[str]:
    """Return the arguments of a gateway.

    Engines are added when they are ready; the admin key and the environment's options are passed as secrets.
    """
    gateway = {**settings.gateway.model_dump(), "host": host}
    env = settings.env.model_dump()
    command = GatewayCommand.model_validate({"model": settings.model, "env": env, "gateway": gateway})
    return arguments_of(command, "gateway.port", "gateway.admin_key", "env.options")


def restart_s(settings: EngineSettings) -> float:
    """Return how long the restart of an engine may take, in seconds."""
    return READY_S if settings.kind != "embedded" else Service.ready_s


def snapshot_weights(current: CurrentWeights, published: Path, name: str) -> tuple[Path, int]:
    """Return the current weights at a path that is kept until the engine `name` restarts.

    Published weights are removed after two more versions, possibly before a starting engine has read them;
    so the engine gets hard links to them. Weights outside `published` are returned unchanged.
    """
    weights, version = current()
    if weights.parent != published:
        return weights, version
    place = published / f"of-{name}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(weights, place, copy_function=os.link)
    return place, version
