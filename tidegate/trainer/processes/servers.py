"""Command lines of a run's servers, and the processes of a run on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.config import EngineSettings, LoRASettings, Settings
from tidegate.errors import StartError
from tidegate.service.api_key import engine_key, given_engine_key
from tidegate.service.serve import write_atomically
from tidegate.service.service import EXTERNAL_READY_S, LOOPBACK, READY_S, ExternalService, Service
from tidegate.settings.policies import VLLM_RANKS
from tidegate.settings.reading import arguments_of
from tidegate.settings.run import AgentSettings
from tidegate.settings.servers import (
    EmbeddedEngine,
    EngineCommand,
    EnvCommand,
    GatewayCommand,
    VLLMCommand,
)
from tidegate.trainer import backends
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.processes.agents import AgentProcess
from tidegate.trainer.processes.gpus import chooses_gpus, engine_gpus, on_gpus, only_visible, visible_gpus
from tidegate.trainer.processes.provider import CurrentWeights, GatewayAccess, GatewayKeys
from tidegate.trainer.processes.rank_process import LocalRankProcess, rank_processes
from tidegate.trainer.publish.layout import engine_set, shares_engines
from tidegate.weights.adapter_files import adapter_label, adapter_names, base_directory, read_headers
from tidegate.weights.files import WeightsError, is_adapter

JUDGE_CACHE = "judge.sqlite"
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers with a LoRA adapter without `trainer.lora.targets`, as SGLang names them."""
ADAPTERS = 2
"""Versions with adapters in one batch: the live one and the one before. SGLang counts the base model, too."""
MAX_RESTARTS = 5
"""Limit on the restarts of one server."""


def engine_names(settings: Settings, policy: str = "") -> list[str]:
    """Return the names of the run's own engines, of several policies those of `policy`."""
    if settings.engine.urls:
        return []
    if policy:  # with a dot, which no policy's name has: `a-1` may be another policy
        return _numbered(f"engine-{policy}", settings.engine.count, ".")
    return _numbered("engine", settings.engine.count)


def agent_names(settings: Settings) -> list[str]:
    """Return `agent`, or `agent-1`, `agent-2` … of several; none if the run starts no agents."""
    if settings.agent.source != "local":
        return []
    return _numbered("agent", settings.agent.workers)


def _numbered(name: str, count: int, mark: str = "-") -> list[str]:
    return [name] if count == 1 else [f"{name}{mark}{number}" for number in range(1, count + 1)]


class SGLangServer(ExternalService):
    """Runs `python -m sglang.launch_server` with the current weights.

    Its `/health` returns 200 only after its own warm-up request.
    """

    def __init__(
        self,
        settings: EngineSettings,
        current: CurrentWeights,
        directory: Path,
        name: str,
        index: int,
        address: str = LOOPBACK,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, name, address=address)
        self._settings = settings
        self._options = options
        self._current = current
        self._index = index

    async def start(self) -> str:
        weights, _ = self._current()
        if is_adapter(weights):
            await asyncio.to_thread(_check_base, weights)
        url = await super().start()
        await asyncio.to_thread(write_atomically, self._announce, json.dumps({"url": url, "pid": self.pid}))
        return url

    def program(self, port: int) -> list[str]:
        weights, version = self._current()
        label, adapters = str(version), list[str]()
        if is_adapter(weights):
            headers = read_headers(weights)
            label, names = adapter_label(version, headers), adapter_names(version, headers)
            adapters = [
                "--lora-paths",
                *(f"{names[one]}={headers[one].directory}" for one in sorted(headers)),
            ]
        return [
            str(self._settings.python), "-m", "sglang.launch_server",
            "--model-path", str(base_directory(weights)), "--host", self.address, "--port", str(port),
            "--weight-version", label, *adapters, *self._options, *self._settings.numbered(self._index),
        ]  # fmt: skip


def _check_base(weights: Path) -> None:
    """Raises StartError if the files of the adapters' base model are others than in the training."""
    try:
        next(iter(read_headers(weights).values())).check_base()
    except WeightsError as error:
        raise StartError(str(error)) from error


def sglang_options(settings: Settings) -> list[str]:
    """Return SGLang's options that the trainer's settings need."""
    experts = ["--enable-return-routed-experts"] if settings.trainer.routing_replay else []
    adapters = _adapters(settings)
    if not adapters:
        return experts
    layers = dict.fromkeys(layer for lora in adapters for layer in lora.targets or LINEAR_LAYERS)
    return [
        *experts, "--enable-lora", "--max-lora-rank", str(max(lora.rank for lora in adapters)),
        "--lora-target-modules", *layers, "--max-loras-per-batch", str(ADAPTERS * len(adapters) + 1),
    ]  # fmt: skip


def vllm_options(settings: Settings) -> list[str]:
    """Return vLLM's options that the trainer's settings need."""
    adapters = _adapters(settings)
    if not adapters:
        return []
    rank = next(rank for rank in VLLM_RANKS if rank >= max(lora.rank for lora in adapters))
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(ADAPTERS * len(adapters))]


def vllm_engine(settings: Settings) -> EngineSettings:
    """Return the settings of vLLM with these options, which the user's arguments may replace."""
    arguments = [*vllm_options(settings), *settings.engine.arguments]
    return settings.engine.model_copy(update={"arguments": arguments})


def _adapters(settings: Settings) -> list[LoRASettings]:
    """Return the LoRA settings of the adapters that engines serve in one version (`Settings.of_engines`)."""
    trained = [own.lora for own in settings.policies.values() if own.train]
    loras = trained if settings.policies else [settings.trainer.lora]
    return [lora for lora in loras if lora is not None and lora.publish == "adapter"]


def vllm_arguments(settings: EngineSettings, current: CurrentWeights, index: int) -> list[str]:
    weights, version = current()
    engine = {"python": settings.python, "arguments": settings.numbered(index)}
    command = VLLMCommand.model_validate({"model": {"path": weights}, "engine": engine})
    return [*arguments_of(command), "--weight-version", str(version)]


def own_engine_key(settings: Settings) -> str | None:
    """Returns the key that a run's engines need; None if they need none.

    A gateway that was started apart does not have the run's random key.
    """
    return engine_key() if settings.gateway.url is None else given_engine_key()


def engine_server(
    settings: Settings,
    name: str,
    index: int,
    key: str | None,
    directory: Path,
    host: str,
    port: int,
    current: CurrentWeights,
) -> Service:
    """Create one of a run's engines; it listens on `host` and starts with the current weights.

    It serves callers with this key, if any; SGLang, which takes a key only from its command line, serves all.
    """
    engine = settings.engine
    if engine.kind == "sglang":
        return SGLangServer(engine, current, directory, name, index, host, sglang_options(settings))

    def arguments() -> list[str]:
        return [*engine_command(settings, current, index)[1:], "--host", host]

    verb = "engine" if engine.kind == "embedded" else engine.kind
    secrets: dict[str, str | None] = {} if key is None else {"key": key}
    if engine.kind not in ("embedded", "vllm"):
        secrets = {"key": key, **backends.engine_secrets(settings)}
    ready_s = EXTERNAL_READY_S if engine.kind == "vllm" else READY_S
    return Service(verb, arguments, directory, name=name, port=port, secrets=secrets, ready_s=ready_s)


def engine_command(settings: Settings, current: CurrentWeights, index: int) -> list[str]:
    """Return the command and the arguments of `tidegate` for one of a run's engines, other than SGLang."""
    if settings.engine.kind == "vllm":
        return ["vllm", *vllm_arguments(vllm_engine(settings), current, index)]
    if settings.engine.kind != "embedded":
        return backends.engine_command(settings, current)
    return ["engine", *engine_arguments(settings, current)]


def teacher_server(settings: Settings, name: str, model: Path, directory: Path) -> Service:
    """Create the engine of a teacher: embedded, with the settings of the run's own, but exact weights."""
    exact = settings.engine.model_copy(update={"quantize": None})
    arguments = engine_arguments(settings.model_copy(update={"engine": exact}), lambda: (model, 0))
    return Service("engine", lambda: arguments, directory, name=name, secrets={"key": engine_key()})


def environment_server(
    settings: Settings, key: str, directory: Path, host: str, port: int, _: CurrentWeights | None = None
) -> Service:
    """Create the environment service with this key."""
    command = EnvCommand.model_validate({"env": settings.env.model_dump(exclude={"urls"})})
    arguments = ["serve", *arguments_of(command, "env.options", "env.judge"), "--host", host]
    secrets = {"key": key, "options": settings.env.options, **judge_secrets(settings, directory)}
    return Service("env", lambda: arguments, directory, port=port, secrets=secrets, host=host)


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
    urls = keys.get("env_urls")
    arguments = gateway_arguments(settings, host, own_environments=urls is None)
    if journal is not None:
        arguments += ["--journal", str(journal)]
    secrets: dict[str, Any] = {name: key for name, key in keys.items() if name != "env_urls"}
    arguments += [f"--env.urls={url}" for url in (urls or "").splitlines()]
    if urls is None:
        secrets |= {"env_options": settings.env.options, **judge_secrets(settings, directory)}
    return Service("gateway", lambda: arguments, directory, port=port, secrets=secrets, host=host)


def agent_process(
    agent: AgentSettings, gateway: GatewayAccess, name: str, directory: Path, *_: object
) -> AgentProcess:
    """Create one of a run's agents' processes, as `engine_server` and `gateway_server` on a cluster."""
    return AgentProcess(agent, gateway, directory, name)


def engine_arguments(settings: Settings, current: CurrentWeights) -> list[str]:
    weights, version = current()
    engine = settings.engine.model_dump(include=set(EmbeddedEngine.model_fields))
    command = EngineCommand.model_validate({"model": {"path": weights}, "engine": engine})
    return [*arguments_of(command), "--weight-version", str(version)]


def gateway_arguments(settings: Settings, host: str, own_environments: bool = True) -> list[str]:
    """Return the arguments of a gateway, which starts `own_environments` or is given addresses.

    Engines are added when they are ready; keys and the environment's options are passed as secrets.
    """
    gateway = {**settings.gateway.model_dump(exclude={"url"}), "host": host}
    engine = {"pause": settings.engine.pause}
    sections: dict[str, Any] = {"model": settings.model, "engine": engine, "gateway": gateway}
    if settings.policies:
        sections["policies"] = {
            name: {
                "path": settings.of_policy(name).model.path.absolute(),
                "tool_parser": settings.gateway.tool_parser,
                "train": own.trained,
                "engines": engine_set(settings, name),
                "adapter": own.train and shares_engines(settings, name),
            }
            for name, own in settings.policies.items()
        }
    if settings.agent.source == "client":
        gateway["keys"] = settings.gateway.keys and settings.gateway.keys.absolute()
        sections["clients"] = {
            "max_groups": Rules.of(settings).capacity,
            "deadline_s": settings.agent.deadline_s,
            **settings.sampling.model_dump(),
            "top_logprobs": settings.trainer.loss.listed_ids,
            "routed_experts": settings.trainer.routing_replay,
        }
    elif own_environments:
        sections["env"] = settings.env.model_dump()
    command = GatewayCommand.model_validate(sections)
    return arguments_of(command, "gateway.port", "gateway.admin_key", "env.options", "env.judge")


def judge_secrets(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return the judge, whose rubric agents must not read, and its cache; nothing without a judge."""
    if settings.env.judge.url is None:
        return {}
    judge = settings.env.judge.resolved().model_dump(mode="json")
    return {"judge": judge, "judge_cache": str(directory.absolute() / JUDGE_CACHE)}


def restart_s(settings: EngineSettings) -> float:
    """Return how long the restart of an engine may take, in seconds."""
    return EXTERNAL_READY_S if settings.kind != "embedded" else READY_S


def snapshot_weights(current: CurrentWeights, published: Path, name: str) -> tuple[Path, int]:
    """Return the current weights at a path that is kept until the engine `name` restarts.

    Published weights are removed after a few more versions, possibly before a starting engine has read them;
    so the engine gets hard links to them. Weights outside `published` are returned unchanged.
    """
    weights, version = current()
    if not weights.is_relative_to(published):
        return weights, version
    place = published / f"of-{name}"
    # Left from the engine's start before, whose weights are not needed any more.
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(weights, place, copy_function=os.link)
    return place, version


class LocalProcesses:
    """`ProcessProvider` of this machine. Processes listen on loopback, unless `gateway.host` differs."""

    host = LOOPBACK
    delivers_in_place = True

    def engines(
        self, settings: Settings, run_dir: Path, current: CurrentWeights, policy: str = ""
    ) -> Sequence[Service]:
        """Create the engines; raises ConfigError if their GPUs would be those of others (`engine_gpus`)."""
        names, key = visible_gpus(), own_engine_key(settings)
        gpus = engine_gpus(settings, len(names)).engines[policy]
        settings = settings.of_engines(policy)

        def engine(index: int, name: str) -> Service:
            snapshot = partial(snapshot_weights, current, run_dir / "weights", name)
            if settings.engine.kind == "embedded":
                own = on_gpus(settings, gpus[index])
                return engine_server(own, name, index, key, run_dir, self.host, 0, snapshot)
            server = engine_server(settings, name, index, key, run_dir, self.host, 0, snapshot)
            if not chooses_gpus(settings.engine):
                server.variables = only_visible(gpus[index], names)
            return server

        return [engine(index, name) for index, name in enumerate(engine_names(settings, policy))]

    def teachers(self, settings: Settings, run_dir: Path) -> Mapping[str, Service]:
        given = {env: model.path for env, model in settings.trainer.teacher.models.items() if model.path}
        gpus = engine_gpus(settings, len(visible_gpus())).teachers
        return {
            env: teacher_server(
                on_gpus(settings, own), "-".join(filter(None, ("teacher", env))), path.absolute(), run_dir
            )
            for (env, path), own in zip(given.items(), gpus, strict=True)
        }

    def environments(self, settings: Settings, run_dir: Path, key: str) -> Service:
        return environment_server(settings, key, run_dir, self.host, 0)

    def gateway(self, settings: Settings, run_dir: Path, keys: GatewayKeys, journal: Path | None) -> Service:
        gateway, keys = settings.gateway, {**keys, "engine_key": engine_key()}
        return gateway_server(settings, keys, journal, run_dir, gateway.host, gateway.port)

    def agents(self, settings: Settings, run_dir: Path, gateway: GatewayAccess) -> Sequence[AgentProcess]:
        return [agent_process(settings.agent, gateway, name, run_dir) for name in agent_names(settings)]

    def rank_processes(self, settings: Settings, run_dir: Path) -> Sequence[LocalRankProcess]:
        return rank_processes(settings.trainer.ranks, run_dir / "logs")

    async def deliver(self, url: str, weights: Path) -> Path:
        return weights
