"""The servers of a run as processes that somebody owns, not started: what they are called, told and given."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tidegate.config import EngineSettings, Settings
from tidegate.service.external import READY_S
from tidegate.service.service import Service
from tidegate.trainer.processes.provider import Live
from tidegate.trainer.processes.sglang import SGLangServer
from tidegate.trainer.processes.vllm import VLLMServer

MAX_RESTARTS = 5
"""Deaths of one server, after which it is given up."""


def engine_names(settings: Settings) -> list[str]:
    """`engine`, or `engine-1`, `engine-2` … where there are several; none where they run already."""
    return [] if settings.engine.urls else _numbered("engine", settings.engine.count)


def agent_names(settings: Settings) -> list[str]:
    """`agent`, or `agent-1`, `agent-2` …"""
    return _numbered("agent", settings.agent.workers)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]


def engine_server(
    settings: Settings, name: str, index: int, directory: Path, host: str, port: int, live: Live
) -> Service:
    """One of a run's engines; it listens at `host`, and comes up with what is live."""
    engine = settings.engine
    if engine.kind == "sglang":
        return SGLangServer(engine, live, directory, name, index, host)
    if engine.kind == "vllm":
        return VLLMServer(engine, live, directory, name, index, host)

    def arguments() -> list[str]:
        return [*engine_arguments(settings, live), "--host", host]

    return Service("engine", arguments, directory, name=name, port=port)


def gateway_server(
    settings: Settings,
    key: str,
    journal: Path | None,
    directory: Path,
    host: str,
    port: int,
    _: Live | None = None,
) -> Service:
    """The gateway, whose admin key is `key`. With a `journal` it can be restarted in mid-run."""
    arguments = gateway_arguments(settings, host)
    if journal is not None:
        arguments += ["--journal", str(journal)]
    secrets = {"admin_key": key, "env_options": settings.env.options}
    return Service("gateway", lambda: arguments, directory, port=port, secrets=secrets, host=host)


def engine_arguments(settings: Settings, live: Live) -> list[str]:
    """The command line of an embedded engine that serves what is live."""
    weights, version = live()
    engine = settings.engine
    return [
        "--model", str(weights), "--weight-version", str(version), "--device", engine.device,
        "--dtype", engine.dtype, "--threads", str(engine.threads),
        "--max-slots", str(engine.max_slots), "--max-context", str(engine.max_context),
        "--prefix-cache-mb", str(engine.prefix_cache_mb),
    ]  # fmt: skip


def gateway_arguments(settings: Settings, host: str) -> list[str]:
    """The command line of a gateway without engines, which are added when they are ready, and without what
    only its owner tells it: the admin key, the environment's options."""
    public = settings.gateway.public_url
    return [
        "--model", str(settings.model.path), "--host", host, "--tool-parser", settings.gateway.tool_parser,
        "--shards", str(settings.gateway.shards),
        "--structured-output", settings.gateway.structured_output,
        *(part for name in settings.gateway.untrained_models for part in ("--untrained-model", name)),
        "--env", settings.env.use,
        "--reward-timeout", str(settings.env.reward_timeout_s),
        *(["--public-url", public] if public is not None else []),
    ]  # fmt: skip


def restart_s(settings: EngineSettings) -> float:
    """How long an engine that died may take until it serves again."""
    return READY_S if settings.kind != "embedded" else Service.ready_s


def pinned(live: Live, published: Path, name: str) -> tuple[Path, int]:
    """What is live, in a place where it stays until the engine `name` is started anew.

    Published weights are removed after two more versions, which may be before a starting engine has read
    them; so it gets hard links of its own to them. Weights from elsewhere stay where they are.
    """
    weights, version = live()
    if weights.parent != published:
        return weights, version
    place = published / f"of-{name}"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(weights, place, copy_function=os.link)
    return place, version
