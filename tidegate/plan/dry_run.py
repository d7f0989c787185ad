"""`tidegate train --dry-run`: describes a run without loading, starting or fetching anything."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tidegate.config import Settings
from tidegate.doctor.model import has_template, refuse_incomplete
from tidegate.errors import ConfigError, StartError, TidegateError
from tidegate.plan.memory import Item, check_memory, disk_plan, readable, run_plan
from tidegate.plan.shape import read_shape
from tidegate.service.directory_lock import refuse_if_in_use
from tidegate.settings import sections
from tidegate.trainer.cluster.placement import Placement
from tidegate.trainer.forecast import advice, episodes_at_a_time, forecast, measure_rate
from tidegate.trainer.preflight import check_writable
from tidegate.trainer.processes.gpus import engine_gpus, visible_gpus
from tidegate.trainer.processes.servers import (
    engine_arguments,
    engine_command,
    gateway_arguments,
    sglang_options,
)

MASK = "…"


def describe(
    settings: Settings, *, resume: bool | str = False, fresh: bool = False, cluster: str | None = None
) -> str:
    """Returns the resolved settings, processes, placement, memory and disk, and what prevents the start."""
    shown = settings
    if settings.gateway.admin_key is not None:
        gateway = settings.gateway.model_copy(update={"admin_key": MASK})
        shown = settings.model_copy(update={"gateway": gateway})
    parts = [
        "# Resolved settings",
        sections.dump(shown).strip(),
        "\n# Processes that would be started",
        *processes(shown),
        *_placement(settings, cluster),
        "\n# Tokens of other weights",
        settings.centering,
        "\n# Memory",
        *_memory(settings),
        "\n# Speed",
        *_speed(settings),
    ]
    missing = obstacles(settings, resume=resume, fresh=fresh, cluster=cluster)
    if missing:
        parts += ["\n# Before it can start", *missing]
    return "\n".join([*parts, "\nA dry run: nothing was loaded or started."])


def obstacles(
    settings: Settings, *, resume: bool | str = False, fresh: bool = False, cluster: str | None = None
) -> list[str]:
    """Returns what prevents the start; devices and memory are those of this machine, without a cluster."""
    found = [*_missing_files(settings), *_run_directory(settings, resume, fresh)]
    return found if cluster is not None else [*found, *_devices(settings), *_too_large(settings)]


def processes(settings: Settings) -> Iterator[str]:
    """Yields the command line of each process, without the addresses that are chosen at the start."""
    if settings.engine.urls:
        yield f"engine    runs already: {', '.join(settings.engine.urls)}"
    else:
        for policy, names in settings.engine_sets.items():
            own = settings.of_engines(policy)
            notes = [f"{own.engine.count} of them"] if own.engine.count > 1 else []
            notes += [f"of {', '.join(names)}"] if policy else []
            note = f"  # {', '.join(notes)}" if notes else ""
            yield f"engine    {shlex.join(_engine(own))}{note}"
    yield from _teachers(settings)
    if settings.gateway.url is not None:
        yield f"gateway   runs already: {settings.gateway.url}"
    else:
        port = f"--gateway.port={settings.gateway.port}"
        gateway = [*gateway_arguments(settings, settings.gateway.host), port]
        yield f"gateway   tidegate gateway {shlex.join(gateway)}"
    if settings.agent.source == "remote":
        yield "agents    none: workers take attempts from the gateway (tidegate worker)"
    elif settings.agent.source == "client":
        yield "agents    none: clients form groups or make plain calls (docs/groups.md, docs/online.md)"
    else:
        yield f"agents    tidegate worker --agent {shlex.quote(settings.agent.use)}"
    trainer = settings.trainer
    others = f" and {trainer.ranks - 1} more ranks" if trainer.ranks > 1 else ""
    yield f"trainer   the run's process{others}, on {trainer.device}, {trainer.steps} steps"


def _teachers(settings: Settings) -> Iterator[str]:
    for env, model in settings.trainer.teacher.models.items():
        of = f"  # of {env}" if env else ""
        if model.path is None:
            yield f"teacher   runs already: {model.url}{of}"
        else:
            arguments = engine_arguments(settings, partial(lambda path: (path, 0), model.path))
            yield f"teacher   tidegate engine {shlex.join(arguments)}{of}"


def _placement(settings: Settings, cluster: str | None) -> Iterator[str]:
    if cluster is not None:
        yield f"\n# On the Ray cluster ({cluster}): one bundle per line, each on one node"
        yield from Placement.of(settings).lines()


def _engine(settings: Settings) -> list[str]:
    model, engine = settings.model.path, settings.engine
    if engine.kind == "sglang":
        server = [str(engine.python), "-m", "sglang.launch_server", "--model-path", str(model)]
        return [*server, "--weight-version", "0", *sglang_options(settings), *engine.numbered(0)]
    return ["tidegate", *engine_command(settings, lambda: (model, 0), 0)]


def _memory(settings: Settings) -> Iterator[str]:
    try:
        shape = read_shape(settings.model.path)
    except TidegateError as error:
        yield str(error)
        return
    yield f"{shape.parameters:,} parameters, from {shape.source}"
    items = run_plan(settings, _free)
    yield from map(_line, items)
    for device in dict.fromkeys(item.device for item in items):
        total = sum(item.size for item in items if item.device == device)
        yield f"{'total on ' + device:<21}{readable(total):>9}{_physical(device)}"
    yield from map(_line, disk_plan(settings, shape))


def _speed(settings: Settings) -> Iterator[str]:
    """Yields the times of steps and evaluations, as measured on engines that run already."""
    if not settings.engine.urls:
        yield "unknown, as no engine runs yet: tidegate doctor measures it, and so does the run's start"
        return
    rate = asyncio.run(measure_rate(settings.engine.urls, episodes_at_a_time(settings)))
    if not rate:
        yield f"unknown, as an engine does not respond: engine.urls = {', '.join(settings.engine.urls)}"
        return
    yield forecast(settings, rate)
    yield from (f"if replies are so long: {text}; {fix}" for text, fix in advice(settings, rate))


def _line(item: Item) -> str:
    return f"{item.owner:<9}{item.what:<12}{readable(item.size):>9}   {item.how}"


def _missing_files(settings: Settings) -> Iterator[str]:
    models = {"model.path": settings.model.path}
    if settings.policies:
        models = {f"policies.{name}.path": settings.of_policy(name).model.path for name in settings.policies}
    for env, teacher in settings.trainer.teacher.models.items():
        if teacher.path is not None:
            models[f"trainer.teacher.{f'by_env.{env}.' if env else ''}path"] = teacher.path
    for name, model in models.items():
        if not name.startswith("trainer.") and not model.is_dir():
            try:
                refuse_incomplete(model)
            except StartError as error:
                yield str(error)
            continue
        for needed in ("config.json", "tokenizer_config.json"):
            if not (model / needed).is_file():
                yield f"{name} = {model}: {needed} does not exist"
        if (model / "tokenizer_config.json").is_file() and not has_template(model):
            yield f"{name} = {model}: it has no chat template; use the chat (instruct) model"
        if (model / "config.json").is_file() and not [*model.glob("*.safetensors"), *model.glob("*.bin")]:
            yield f"{name} = {model}: it has no weights (*.safetensors)"


def _devices(settings: Settings) -> Iterator[str]:
    """Yields why a device that is not the CPU cannot be used; only then imports torch."""
    named = {"trainer.device": settings.trainer.device}
    if not settings.engine.urls and settings.engine.kind == "embedded":
        named["engine.device"] = settings.engine.device
    for setting, device in named.items():
        if device != "cpu":
            from tidegate.devices import find_device

            try:
                find_device(setting, device)
            except StartError as error:
                yield str(error)
    try:
        engine_gpus(settings, len(visible_gpus()))
    except ConfigError as error:
        yield str(error)


def _too_large(settings: Settings) -> Iterator[str]:
    try:
        check_memory(settings, _free)
    except TidegateError as error:
        yield str(error)


def _free(device: str) -> int | None:
    """Returns the memory of the machine, or the free memory of a GPU; None if it is unknown."""
    if device == "cpu":
        return _memory_of_machine()
    from tidegate.devices import free_memory

    try:
        return free_memory(device)
    except (RuntimeError, AssertionError):  # torch cannot use it, which is an obstacle of its own
        return None


def _run_directory(settings: Settings, resume: bool | str, fresh: bool) -> Iterator[str]:
    try:
        refuse_if_in_use(settings.run_dir)
        check_writable(settings.run_dir)
    except StartError as error:
        yield str(error)
    exists = (settings.run_dir / "ledger.jsonl").exists()
    if resume is True and not exists:
        yield f"{settings.run_dir} holds no run to resume; omit --resume to start one"
    elif exists and not resume and not fresh:
        yield f"{settings.run_dir} holds a run already: --resume continues it, --fresh renames it"


def _physical(device: str) -> str:
    """Returns the machine's memory; empty for other devices than the CPU."""
    present = _memory_of_machine()
    return "" if device != "cpu" or present is None else f"   this machine has {readable(present)}"


def _memory_of_machine() -> int | None:
    """Returns the physical memory, or a container's limit of it, in bytes."""
    if not hasattr(os, "sysconf"):
        return None
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or `max`
        return physical
