"""Assigns the GPUs of one machine: the first to the trainer's ranks, the next to the run's engines.

On a machine with one GPU a single rank and the engines share it. On a cluster Ray assigns GPUs.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tidegate.config import EngineSettings, Settings
from tidegate.errors import ConfigError, StartError

SIZES = (
    ("--tp-size", "--tensor-parallel-size", "--tp", "-tp"),
    ("--pp-size", "--pipeline-parallel-size", "--pp", "-pp"),
    ("--dp-size", "--data-parallel-size", "--dp", "-dp"),
)
"""Arguments of SGLang and vLLM whose values are multiplied: an engine's number of GPUs."""
FIRST, STEP = ("--base-gpu-id",), ("--gpu-id-step",)
"""Arguments by which SGLang's GPUs are chosen."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
LIST_GPUS = ("nvidia-smi", "-L")
LIST_S = 30.0


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that a process of this machine sees, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return [str(index) for index in range(_count_gpus())]
    names = (name.strip() for name in given.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


@cache
def _count_gpus() -> int:
    if DRIVER.is_dir():
        return len(list(DRIVER.iterdir()))
    # As in WSL 2 and in some sandboxes.
    try:
        listed = subprocess.run([*LIST_GPUS], capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def check_visible(settings: Settings, found: int) -> None:
    """Raises StartError if torch finds GPUs that `visible_gpus` does not, so that none could be assigned."""
    if found and settings.trainer.device.startswith("cuda") and not visible_gpus():
        numbers = ",".join(map(str, range(found)))
        raise StartError(
            f"trainer.device = {settings.trainer.device!r}: this machine does not list its GPUs ({DRIVER} "
            f"and nvidia-smi -L show none), so ranks and engines would share one: set {VISIBLE}={numbers}"
        )


def only_visible(gpus: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """Return the variable by which a process sees only these of the named GPUs; none without GPUs."""
    return {VISIBLE: ",".join(names[gpu] for gpu in gpus)} if gpus else {}


def on_gpus(settings: Settings, gpus: Sequence[int]) -> Settings:
    """Return the settings with the device of an embedded engine that has these GPUs."""
    if not gpus:
        return settings
    engine = settings.engine.model_copy(update={"device": f"cuda:{gpus[0]}"})
    return settings.model_copy(update={"engine": engine})


class EngineGPUs(NamedTuple):
    """GPUs of the engines that a run starts: none for an engine on a CPU."""

    engines: dict[str, list[tuple[int, ...]]]
    """By the policies that they serve, as in `Settings.engine_sets`."""
    teachers: list[tuple[int, ...]]


@dataclass(slots=True)
class _Server:
    """An engine or a teacher, whose GPUs are named or not yet chosen."""

    policy: str | None
    """The first policy that it serves; None: it is a teacher."""
    name: str
    setting: str
    """The setting that names its GPUs."""
    embedded: bool
    size: int
    """Number of its GPUs."""
    gpus: tuple[int, ...] | None


def engine_gpus(settings: Settings, available: int) -> EngineGPUs:
    """Return the GPUs of all engines that the run starts, and of its teachers, of `available` ones.

    Raises:
        ConfigError: ranks or engines would share a GPU that they must not share, or there are too few.
    """
    sets = {policy: _servers(settings, policy) for policy in settings.engine_sets}
    paths = [model.path for model in settings.trainer.teacher.models.values() if model.path is not None]
    teacher = _of_embedded(settings.engine)
    teachers = [
        _Server(None, f"teacher {number}", "engine.device", True, 1, teacher)
        for number, _ in enumerate(paths)
    ]
    _place(settings, [*itertools.chain(*sets.values()), *teachers], available)
    return EngineGPUs(
        {policy: [server.gpus or () for server in servers] for policy, servers in sets.items()},
        [server.gpus or () for server in teachers],
    )


def _place(settings: Settings, servers: Sequence[_Server], available: int) -> None:
    """Choose the GPUs of servers whose GPUs are not named; raises ConfigError as `engine_gpus`."""
    if available == 0:  # a missing GPU is refused by the name of its setting
        for server in servers:
            server.gpus = ()
        return
    trainer = settings.trainer
    ranks = _ranks(settings)
    if len(ranks) > available:
        raise ConfigError(
            f"trainer.ranks = {trainer.ranks} need a GPU each, and this machine has {available}: lower "
            "trainer.ranks"
        )
    shared = available == 1 and len(ranks) <= 1
    taken = set(ranks).union(*(server.gpus or () for server in servers))
    free = iter([0] * len(servers) if shared else [gpu for gpu in range(available) if gpu not in taken])
    sizes = Counter(server.size for server in servers)
    for server in servers:
        if server.gpus is not None:
            continue
        server.gpus = tuple(itertools.islice(free, server.size))
        if len(server.gpus) < server.size:
            engines = " + ".join(f"{count} × {size}" for size, count in sizes.items())
            raise ConfigError(
                f"trainer.ranks = {trainer.ranks} and {len(servers)} engines need {len(ranks)} + {engines} "
                f"GPUs, and this machine has {available}: lower engine.count or trainer.ranks, or name one "
                'GPU for all embedded engines (engine.device = "cuda:1")'
            )
    _check_shares(settings, ranks, servers, by_name=not shared)


def chooses_gpus(engine: EngineSettings) -> bool:
    """Whether an argument of SGLang or vLLM chooses its GPUs among all visible ones."""
    return _value(engine.arguments, FIRST) is not None


def _check_shares(
    settings: Settings, ranks: Sequence[int], servers: Sequence[_Server], *, by_name: bool
) -> None:
    """Raises ConfigError if a rank and an engine, or two servers, share a GPU without having been told to."""
    trainer = settings.trainer
    for number, server in enumerate(servers):
        gpus = set(server.gpus or ())
        for gpu in gpus.intersection(ranks):
            if trainer.publish_transport == "broadcast":
                raise ConfigError(
                    f"GPU {gpu} is used by trainer rank {ranks.index(gpu)} and by an engine, between which "
                    'trainer.publish_transport = "broadcast" cannot send weights: use another GPU, or "files"'
                )
            if by_name and (trainer.ranks > 1 or trainer.device == "cuda"):
                raise ConfigError(
                    f"{server.setting} puts {server.name} on GPU {gpu}, which trainer rank "
                    f"{ranks.index(gpu)} uses: name another one, or leave it out (the trainer uses GPUs "
                    f"{ranks[0]} to {ranks[-1]})"
                )
        for other in servers[:number] if by_name else ():
            twice = gpus.intersection(other.gpus or ())
            if not twice or (server.embedded and other.embedded):
                continue
            if server.policy == other.policy:
                raise ConfigError(
                    f"{server.setting} puts several engines on GPU {min(twice)}: use {{index}}, the engine's "
                    "number"
                )
            raise ConfigError(
                f"{server.setting} puts {server.name} on GPU {min(twice)}, which {other.name} uses "
                f"({other.setting}): name another one (policies.NAME.engine), or leave it out"
            )


def _servers(settings: Settings, policy: str) -> list[_Server]:
    """Return the engines of one set, which serves `policy` first."""
    engine = settings.of_engines(policy).engine
    embedded = engine.kind == "embedded"
    own = policy and settings.policies[policy].engine is not None
    section = f"policies.{policy}.engine" if own else "engine"
    setting = f"{section}.device" if embedded else f"--base-gpu-id in {section}.arguments"
    of = f" of policy {policy}" if policy else ""
    return [
        _Server(policy, f"engine {index}{of}", setting, embedded, _size(engine), _named(engine, index))
        for index in range(0 if engine.urls else engine.count)
    ]


def _ranks(settings: Settings) -> list[int]:
    """Return the GPUs of the trainer's ranks, by rank."""
    kind, _, index = settings.trainer.device.partition(":")
    if kind != "cuda":
        return []
    return [int(index)] if index else list(range(settings.trainer.ranks))


def _named(engine: EngineSettings, index: int) -> tuple[int, ...] | None:
    """Return the GPUs that the settings give an engine; None if they leave the choice."""
    if engine.kind == "embedded":
        return _of_embedded(engine)
    arguments = engine.numbered(index)
    if _value(arguments, ("--device",)) == "cpu":
        return ()
    first = _value(arguments, FIRST)
    if first is None or not first.isdecimal():
        return None
    step = int(_value(arguments, STEP) or 1)
    return tuple(int(first) + step * number for number in range(_size(engine)))


def _of_embedded(engine: EngineSettings) -> tuple[int, ...] | None:
    """Return the GPU of an embedded engine; None if the settings leave the choice."""
    kind, _, number = engine.device.partition(":")
    if kind != "cuda":
        return ()
    return (int(number),) if number else None


def _size(engine: EngineSettings) -> int:
    """Return the number of GPUs of one engine."""
    if engine.kind == "embedded":
        return 1
    sizes = SIZES[:-1] if "--enable-dp-attention" in engine.arguments else SIZES
    values = [_value(engine.arguments, names) or "1" for names in sizes]
    return math.prod(int(value) for value in values if value.isdecimal())


def _value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of a server's argument, given as `--name value` or `--name=value`."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return next((value for name, value in itertools.pairwise(words) if name in names), None)
